"""Ways to make a run on a device fit: each way out with the bytes it leaves, replayed on top of those before it.

None is guessed: the step is changed as the way out changes it, and simulated again. A way that frees next to nothing is
left out, and with the first under which the run fits the list ends.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Struct

from memwall.planning.settings import Settings
from memwall.planning.technique import Recording, techniques
from memwall.predict.cuda.fused_optimizer import can_fuse, with_fused_optimizer
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

# Below this a way out is not worth mentioning.
_NOTABLE_SHARE = 0.01

State = TypeVar("State")
Way = Callable[[State], tuple[str, State] | None]
"""Gives the run with one thing changed, and what to do for it; None where it cannot be done."""


def _ways_out(
    state: State, ways: Iterable[Way[State]], *, bytes_of: Callable[[State], int], fits: Callable[[int], bool]
) -> tuple[str, ...]:
    """Returns one line for each way that frees something, up to the one under which the run fits.

    Args:
        ways: cheapest first; each is given the run as those before it leave it.
        bytes_of: what a run needs; the figure that is shown.
        fits: whether so many bytes fit.
    """
    lines: list[str] = []
    left, before_bytes = list(ways), bytes_of(state)
    position = 0
    while position < len(left) and not fits(before_bytes):
        found = left[position](state)
        after_bytes = before_bytes if found is None else bytes_of(found[1])
        if found is None or before_bytes - after_bytes <= _NOTABLE_SHARE * before_bytes:
            position += 1
            continue
        text, state = found
        lines.append(
            f"{'and ' if lines else ''}{text}: {format_bytes(after_bytes, rounding='up')}, "
            f"{format_bytes(before_bytes - after_bytes, rounding='down')} less"
            f"{', which fits' if fits(after_bytes) else ''}"
        )
        before_bytes = after_bytes
        left.pop(position)
        position = 0  # what freed nothing may do so now that the peak is elsewhere
    return tuple(lines)


class Run(Struct, frozen=True, kw_only=True):
    """Holds an untreated run on a device, as it is simulated."""

    trace: Trace
    num_micro_batches: int
    """Forwards and backwards in a step."""
    settings: AllocatorSettings | None = None
    """The allocator's; None for torch's defaults."""


def estimate_relaxations(
    run: Run, settings: tuple[str, AllocatorSettings], *, bytes_of: Callable[[Run], int], fits: Callable[[int], bool]
) -> tuple[str, ...]:
    """Returns what makes an untreated run fit without recomputing or moving anything.

    Args:
        settings: other settings of the allocator, as text and as they are simulated.
        bytes_of: process bytes of a run. fits: whether so many fit, their margin included.
    """
    text, allocator = settings

    def with_settings(run: Run) -> tuple[str, Run]:
        return f"set {text}", msgspec.structs.replace(run, settings=allocator)

    def with_fused(run: Run) -> tuple[str, Run] | None:
        if not can_fuse(run.trace):
            return None
        return _fused_text(run.trace), msgspec.structs.replace(run, trace=with_fused_optimizer(run.trace))

    def split(run: Run) -> tuple[str, Run] | None:
        smaller = list(_split(run))
        if not smaller:
            return None
        found = next((part for part in smaller if fits(bytes_of(part))), smaller[-1])
        size, number = found.trace.micro_batch, found.num_micro_batches
        return f"a micro-batch of {size} and {number} accumulation steps, the same global batch", found

    return _ways_out(run, (with_settings, with_fused, split), bytes_of=bytes_of, fits=fits)


def _split(run: Run) -> Iterator[Run]:
    """Yields the run with ever smaller micro-batches."""
    trace = run.trace
    for technique in techniques():
        first, steady = (technique.parts(trace, s, is_cooperative=True) for s in (trace.steps[0], steady_step(trace)))
        for (first_part, num_parts, _), (part, *_) in zip(first, steady, strict=True):
            yield msgspec.structs.replace(
                run,
                trace=msgspec.structs.replace(
                    trace, steps=(first_part, part), micro_batch=trace.micro_batch // num_parts
                ),
                num_micro_batches=run.num_micro_batches * num_parts,
            )


def plan_relaxations(
    trace: Trace,
    settings: Settings,
    *,
    smallest_bytes: int,
    smallest_bytes_of: Callable[[Trace, Settings], int],
) -> tuple[str, ...]:
    """Returns what makes a plan for a device possible, with the smallest feasible budget each leaves.

    Args:
        settings: with the device, and what records the step in other ways where that is possible.
        smallest_bytes: smallest feasible budget of the trace as it is. smallest_bytes_of: that of a changed one.
    """
    recordings = None if settings.recordings is None else settings.recordings.kept()
    asked = Recording(trace, msgspec.structs.replace(settings, recordings=recordings))

    def bytes_of(found: Recording) -> int:
        return smallest_bytes if found is asked else smallest_bytes_of(found.trace, found.settings)

    def with_fused(found: Recording) -> tuple[str, Recording] | None:
        return (_fused_text(trace), found.changed(with_fused_optimizer)) if can_fuse(found.trace) else None

    ways = (with_fused, *(one.way_out for one in sorted(techniques(), key=lambda technique: technique.way_out_rank)))
    found = _ways_out(asked, ways, bytes_of=bytes_of, fits=lambda needed: needed <= settings.budget_bytes)
    return (*found, "a shorter sequence, or a lower resolution")


def _fused_text(trace: Trace) -> str:
    return f"fused=True in torch.optim.{trace.optimizer}"
