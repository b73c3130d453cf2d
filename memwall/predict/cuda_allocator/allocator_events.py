"""The requests of a training run to the allocator, as a flat sequence of events; and recorded steps as such."""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain

from msgspec import Struct

from memwall.errors import TraceError
from memwall.predict.cuda_allocator.held_blocks import Held, Standing
from memwall.predict.cuda_allocator.rounding import MIN_BLOCK_BYTES, round_up
from memwall.trace.records import Step

ALLOC, FREE, FREE_LATER, COMPLETE, EMPTY_CACHE = range(5)

Event = tuple[int, int, int, int]
"""Action, block, bytes, stream. A block's number is used once. FREE_LATER: the program frees a block that another
stream still uses. COMPLETE: that is done with it, and the allocator takes the block back."""


class EventTrace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds events in the order in which the process issues them."""

    events: tuple[Event, ...]
    steps: tuple[int, ...]
    """Where each step begins; what stands before the first is allocated ahead of it."""
    held: Held | None = None
    """Memory that is there before the first event; None for nothing."""

    @property
    def steady_from(self) -> int:
        """Returns where the first step is over and every further one should need nothing new."""
        return self.steps[1] if len(self.steps) > 1 else len(self.events)


def events_of_steps(steps: Sequence[Step], *, num_repeats: int = 2, standing: Standing | None = None) -> EventTrace:
    """Returns the storages of recorded steps on a CUDA device as allocator events.

    Before each operation the storages that died are freed, then its own are allocated. What outlives a step is what
    stands before the next one, matched by size.

    Args:
        steps: in the order in which they run.
        num_repeats: how often the last one runs.
        standing: what is held before the first of them; None for nothing. The cache is emptied ahead of that.

    Raises:
        TraceError: no step is given, or none has a storage on a CUDA device.
    """
    if not steps:
        raise TraceError("there is no step to replay; record at least one")
    builder = _Builder()
    if standing is not None:
        builder.begin_with(standing)
    last = len(steps) - 1
    for position in range(last + num_repeats):
        builder.add_step(steps[min(position, last)], min(position, last))
    if not builder.events:
        found = sorted({storage.device for step in steps for storage in step.storages})
        raise TraceError(f"no storage of the trace is on 'cuda'; its storages are on {', '.join(found) or 'nothing'}")
    return EventTrace(
        events=tuple(builder.events),
        steps=tuple(builder.steps),
        held=None if standing is None else standing.held,
    )


def live_peak_bytes(trace: EventTrace) -> int:
    """Returns the most bytes that blocks of the events take at once, each rounded to 512: no less can be reserved."""
    size_of: dict[int, int] = {}
    live = peak = 0
    for action, block, nbytes, _ in trace.events:
        if action == ALLOC:
            size_of[block] = size = round_up(nbytes, MIN_BLOCK_BYTES)
            live += size
            peak = max(peak, live)
        elif action in (FREE, FREE_LATER):
            live -= size_of.pop(block)
    return peak


class _Builder:
    """Collects events, and what stands between two steps."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[int] = []
        self._num_blocks = 0
        self._scripts: dict[int, tuple[list[int], list[tuple[int, int]]]] = {}
        """Holds what `_script` returns, by the step's identity."""
        self._standing: dict[tuple[int, int], tuple[int, int]] = {}
        """Block and bytes, by step and storage."""
        self._is_cache_full = False
        """Whether segments that the first step does not begin with are returned ahead of it."""

    def begin_with(self, standing: Standing) -> None:
        """Has the first step begin with blocks that are there."""
        self._standing = {(-1, i): (-1 - i, standing.held.blocks[i].requested_bytes) for i in standing.of_step}
        self._is_cache_full = True

    def add_step(self, step: Step, number: int) -> None:
        if id(step) not in self._scripts:
            self._scripts[id(step)] = _script(step)
        wanted, script = self._scripts[id(step)]
        live = self._link(step, number, wanted)
        self.steps.append(len(self.events))
        events, block, storages = self.events, self._num_blocks, step.storages
        for index, nbytes in script:
            if nbytes:
                live[index] = block = block + 1
                events.append((ALLOC, block, nbytes, storages[index].stream))
            else:
                events.append((FREE, live.pop(index), 0, 0))
        self._num_blocks = block
        self._standing = {(number, index): (block, step.storages[index].nbytes) for index, block in live.items()}

    def _link(self, step: Step, number: int, wanted: Sequence[int]) -> dict[int, int]:
        """Gives what stands to the storages the step begins with; the rest is freed, what is missing allocated."""
        live: dict[int, int] = {}
        for index in wanted:
            if (number, index) in self._standing:
                live[index] = self._standing.pop((number, index))[0]
        spare: defaultdict[int, deque[int]] = defaultdict(deque)
        for block, nbytes in self._standing.values():
            spare[nbytes].append(block)
        missing = []
        for index in wanted:
            if index not in live:
                if spare[step.storages[index].nbytes]:
                    live[index] = spare[step.storages[index].nbytes].popleft()
                else:
                    missing.append(index)
        for blocks in spare.values():
            self.events.extend((FREE, block, 0, 0) for block in blocks)
        if self._is_cache_full:
            self._is_cache_full = False
            self.events.append((EMPTY_CACHE, 0, 0, 0))
        for index in missing:
            storage = step.storages[index]
            parts = [self._allocate(nbytes) for nbytes in storage.copied]
            live[index] = self._allocate(storage.nbytes, storage.stream)
            self.events.extend((FREE, part, 0, 0) for part in parts)
        return live

    def _allocate(self, nbytes: int, stream: int = 0) -> int:
        self._num_blocks += 1
        self.events.append((ALLOC, self._num_blocks, nbytes, stream))
        return self._num_blocks


def _script(step: Step) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the storages that a step begins with, and what it does in order.

    That is a storage and its bytes where one is allocated, 0 bytes where it is freed.
    """
    num_ops = len(step.ops)
    births: list[list[tuple[int, int]]] = [[] for _ in range(num_ops)]
    deaths: list[list[tuple[int, int]]] = [[] for _ in range(num_ops)]
    wanted: list[int] = []
    at_end: list[tuple[int, int]] = []
    """Frees the loss, which its loop holds until then: what is as large and stands in the next step is not it."""
    elsewhere = {device for device in {storage.device for storage in step.storages} if not device.startswith("cuda")}
    for index, storage in enumerate(step.storages):
        if storage.nbytes <= 0 or storage.death < storage.birth or storage.device in elsewhere:
            continue
        if storage.death == storage.birth:  # its operation frees it before it asks for anything else
            if 0 <= storage.birth < num_ops:
                births[storage.birth] += [(index, storage.nbytes), (index, 0)]
            continue
        if storage.death < num_ops:
            deaths[storage.death].append((index, 0))
        if storage.birth < 0:
            wanted.append(index)
        elif storage.birth < num_ops:
            births[storage.birth].append((index, storage.nbytes))
            is_loss = storage.phase == "loss" and storage.category == "temporary" and not storage.is_kept
            if storage.death >= num_ops and is_loss:
                at_end.append((index, 0))
    script = chain.from_iterable(chain.from_iterable(zip(deaths, births, strict=True)))
    return wanted, [*script, *at_end]
