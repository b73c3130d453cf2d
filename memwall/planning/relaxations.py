"""What would make a run on a device fit: each way out with the bytes it leaves, replayed on top of those before it.

None is guessed: the step is changed as the way out changes it, and simulated again. A way that frees next to nothing is
left out, and with the first under which the run fits the list ends.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from memwall.machine.tiers import Machine, Tier
from memwall.planning.action import Action
from memwall.planning.location import can_offload
from memwall.planning.settings import Settings
from memwall.planning.techniques.accumulate import can_accumulate, candidate_micro_batches, with_micro_batch
from memwall.planning.techniques.autocast import can_autocast
from memwall.planning.techniques.kernels import can_use_kernels, could_have_kernels
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.fused_optimizer import can_fuse, with_fused_optimizer
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

__all__ = ["Run", "estimate_relaxations", "plan_relaxations"]

# Below this a way out is not worth mentioning.
_NOTABLE_SHARE = 0.01
_ROOM_ENOUGH_BYTES = 1 << 50

State = TypeVar("State")
Way = Callable[[State], tuple[str, State] | None]
"""The run with one thing changed, and what to do for it; None where it cannot be done."""


def _ways_out(
    state: State, ways: Iterable[Way[State]], *, bytes_of: Callable[[State], int], fits: Callable[[int], bool]
) -> tuple[str, ...]:
    """One line for each way that frees something, up to the one under which the run fits.

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
    """An untreated run on a device, as it is simulated."""

    trace: Trace
    num_micro_batches: int
    """Forwards and backwards in a step."""
    settings: AllocatorSettings | None = None
    """Of the allocator; None for torch's defaults."""


def estimate_relaxations(
    run: Run, settings: tuple[str, AllocatorSettings], *, bytes_of: Callable[[Run], int], fits: Callable[[int], bool]
) -> tuple[str, ...]:
    """What makes an untreated run fit without recomputing or moving anything.

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
        if can_accumulate(run.trace, is_cooperative=True) is not None:
            return None
        smaller = [_with_micro_batch(run, size) for size in candidate_micro_batches(run.trace)[1:]]
        found = next((part for part in smaller if fits(bytes_of(part))), smaller[-1])
        size, number = found.trace.micro_batch, found.num_micro_batches
        return f"a micro-batch of {size} and {number} accumulation steps, the same global batch", found

    return _ways_out(run, (with_settings, with_fused, split), bytes_of=bytes_of, fits=fits)


def _with_micro_batch(run: Run, micro_batch: int) -> Run:
    trace = run.trace
    steps = tuple(with_micro_batch(trace, step, micro_batch) for step in (trace.steps[0], steady_step(trace)))
    return msgspec.structs.replace(
        run,
        trace=msgspec.structs.replace(trace, steps=steps, micro_batch=micro_batch),
        num_micro_batches=run.num_micro_batches * trace.micro_batch // micro_batch,
    )


class _Asked(NamedTuple):
    """What a plan is asked for, as changes of what it was asked for first."""

    settings: Settings
    is_fused: bool = False
    has_host: bool = False
    is_lower: bool = False
    has_kernels: bool = False


def plan_relaxations(
    trace: Trace,
    settings: Settings,
    *,
    smallest_bytes: int,
    smallest_bytes_of: Callable[[Trace, Settings], int],
) -> tuple[str, ...]:
    """What makes a plan for a device possible, with the smallest feasible budget each leaves.

    Args:
        settings: with the device, and what records the step in lower precision where that is possible.
        smallest_bytes: smallest feasible budget of the trace as it is. smallest_bytes_of: that of a changed one.
    """
    asked_first = _Asked(settings)
    lower = _once(settings.under_autocast)

    @cache
    def fused(precision: str | None) -> tuple[Trace, Action | None]:
        assert settings.with_kernels is not None, "asked for only where it is there"
        return settings.with_kernels(precision)

    def trace_of(asked: _Asked) -> Trace:
        found = lower() if asked.is_lower else trace
        if asked.has_kernels:
            found = fused(lower().autocast if asked.is_lower else None)[0]
        if asked.is_fused:
            found = with_fused_optimizer(found)
        return _with_host_memory(found, settings) if asked.has_host else found

    def bytes_of(asked: _Asked) -> int:
        return smallest_bytes if asked is asked_first else smallest_bytes_of(trace_of(asked), asked.settings)

    def with_fused(asked: _Asked) -> tuple[str, _Asked] | None:
        return (_fused_text(trace), asked._replace(is_fused=True)) if can_fuse(trace) else None

    def split(asked: _Asked) -> tuple[str, _Asked] | None:
        if asked.settings.allow_accumulation or can_accumulate(trace, is_cooperative=True) is not None:
            return None
        samples = trace.micro_batch * trace.num_micro_batches
        changed = msgspec.structs.replace(asked.settings, allow_accumulation=True)
        return f"smaller micro-batches that accumulate: --global-batch {samples}", asked._replace(settings=changed)

    def with_host(asked: _Asked) -> tuple[str, _Asked] | None:
        if can_offload(trace) is None:
            return None
        return "host memory for saved tensors and optimizer state: --host SIZE", asked._replace(has_host=True)

    def with_kernels(asked: _Asked) -> tuple[str, _Asked] | None:
        if settings.with_kernels is None or not could_have_kernels(trace):
            return None
        if can_use_kernels(trace.device, settings.allow, is_here=False) is None:
            return None
        if fused(None)[1] is None:
            return None
        return "fused kernels, which round at other points: --allow kernels", asked._replace(has_kernels=True)

    def in_lower(asked: _Asked) -> tuple[str, _Asked] | None:
        if settings.under_autocast is None or can_autocast(trace, ("precision",)) is not None:
            return None
        text = f"{lower().autocast} autocast, which changes numerics: --allow precision"
        return text, asked._replace(is_lower=True)

    ways = (with_fused, with_kernels, split, with_host, in_lower)
    found = _ways_out(asked_first, ways, bytes_of=bytes_of, fits=lambda needed: needed <= settings.budget_bytes)
    return (*found, "a shorter sequence, or a lower resolution")


def _fused_text(trace: Trace) -> str:
    return f"fused=True in torch.optim.{trace.optimizer}"


def _with_host_memory(trace: Trace, settings: Settings) -> Trace:
    """The trace of a device whose host has room for everything."""
    if settings.hardware is None:
        return trace
    speed = settings.hardware.host_link_bytes_per_second
    host = Tier(name="host", write_bytes_per_second=speed, read_bytes_per_second=speed, free_bytes=_ROOM_ENOUGH_BYTES)
    return msgspec.structs.replace(trace, machine=Machine(tiers=(host,)))


def _once(record: Callable[[], Trace] | None) -> Callable[[], Trace]:
    """Recording takes seconds, and gives the same trace each time."""

    @cache
    def recorded() -> Trace:
        assert record is not None, "asked for only where it is there"
        return record()

    return recorded
