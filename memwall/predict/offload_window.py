"""The window of a device's offloads: what is still held while its copy runs, and what comes back ahead of its use.

It repeats in numbers what `memwall.apply.offload.engine` and `memwall.store.pinned_tier` do. A source is held until
more than the window has left after it: then the step waits for the oldest copies. What is held when backward begins
never went, and is given back as it is. When backward takes one, as many older ones come back as the window has room.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memwall.predict.lives import Time


class Passing(NamedTuple):
    """Describes bytes of a device that leave in forward."""

    nbytes: int
    left: Time
    """When their copy begins."""
    prefetch: Time
    """When their block is asked back."""
    demand: Time
    """When backward takes them."""
    whole_bytes: int = 0
    """Counts them once they are back, where they leave in fewer; 0: as many."""


class Passage(NamedTuple):
    """Says what a window makes of that."""

    held_until: Time | None
    """When the source is let go; None where it is still held when the bytes are asked back, and they never went."""
    back: Time
    """When memory for them is taken again."""


_LEAVES, _IS_PREFETCHED, _IS_TAKEN = range(3)


def through_window(passing: Sequence[Passing], window_bytes: int, *, holds_sources: bool = True) -> list[Passage]:
    """Returns the passage of each, in the order given.

    Args:
        holds_sources: whether sources are held at all, or let go as soon as they have left.
    """
    events = sorted(
        (time, what, number)
        for number, one in enumerate(passing)
        for what, time in ((_LEAVES, one.left), (_IS_PREFETCHED, one.prefetch), (_IS_TAKEN, one.demand))
    )
    until: list[Time | None] = [None] * len(passing)
    back = [one.demand for one in passing]
    whole = [one.whole_bytes or one.nbytes for one in passing]
    leaving: dict[int, None] = {}
    loaded: dict[int, None] = {}
    waiting: list[int] = []
    leaving_bytes = loaded_bytes = 0

    def load(number: int, time: Time) -> None:
        nonlocal loaded_bytes
        if number not in loaded:
            loaded[number] = None
            loaded_bytes += whole[number]
            back[number] = min(back[number], time)

    for time, what, number in events:
        nbytes = passing[number].nbytes
        if what == _LEAVES:
            waiting.append(number)
            leaving[number] = None
            leaving_bytes += nbytes
            while leaving_bytes > (window_bytes if holds_sources else 0):
                oldest = next(iter(leaving))
                del leaving[oldest]
                leaving_bytes -= passing[oldest].nbytes
                if oldest not in loaded:
                    until[oldest] = time
        elif number in waiting:
            load(number, time)
            if what == _IS_TAKEN:
                place = waiting.index(number)
                for older in reversed(waiting[:place]):
                    if older not in loaded:
                        if loaded_bytes > window_bytes + whole[number] - whole[older]:
                            break
                        load(older, time)
                del waiting[place], loaded[number]
                loaded_bytes -= whole[number]
                if number in leaving:
                    del leaving[number]
                    leaving_bytes -= nbytes
    return [Passage(*each) for each in zip(until, back, strict=True)]
