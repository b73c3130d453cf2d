"""Gradients and parameters on disk: what that frees and what it costs; the last resort of the search."""

from collections.abc import Sequence

from memwall.planning.actions import OptimizerPlacement, ParameterPlacement
from memwall.planning.legality import can_move_parameters
from memwall.planning.placement import CPU_SECONDS_PER_BYTE
from memwall.predict.parameters_on_disk import Away, away_from, paged_bytes, streamed_blocks, with_parameters_on_disk
from memwall.trace.records import Module, Step, Trace

__all__ = [
    "MIN_PARAMETER_BYTES",
    "as_streamed",
    "built_bytes",
    "parameter_placements",
    "parameter_window_bytes",
    "passing_bytes",
    "streamed",
    "streamed_bytes",
]

MIN_PARAMETER_BYTES = 256 << 10
"""Smaller parameters stay in memory with their gradients: norms and biases, as a rule."""
# What is stepped at a time: enough to keep a disk busy; of few parameters a part that is little beside them.
_WINDOW_BYTES = 32 << 20
_MIN_WINDOW_BYTES = 1 << 20
_WINDOW_SHARE = 1 / 32
# Parts of the parameters that may stay in memory where their gradients cannot.
_STAYING_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


def parameter_window_bytes(parameter_bytes: int) -> int:
    """The window for so many bytes of parameters."""
    return min(max(int(parameter_bytes * _WINDOW_SHARE), _MIN_WINDOW_BYTES), _WINDOW_BYTES)


def parameter_placements(
    trace: Trace, steady: Step, state: OptimizerPlacement, *, capacity_bytes: int
) -> tuple[ParameterPlacement, ...] | str:
    """Ways to have gradients on disk, and parameters: none of them first, all at last; the reason where none is legal.

    Args:
        steady: the step that repeats, as it was recorded.
        state: where the optimizer's state is at the leanest: all of it on disk, too.
        capacity_bytes: what the disk may be used for.
    """
    blocks = streamed_blocks(trace.modules)
    leanest = away_from(steady, trace.modules, blocks, MIN_PARAMETER_BYTES)
    leaving_bytes = leanest.parameter_bytes + leanest.gradient_bytes
    away_bytes = leaving_bytes + (state.saved_bytes or 0) if leanest.users else 0
    reason = can_move_parameters(trace, away_bytes, capacity_bytes)
    if reason is not None:
        return reason
    found = []
    for staying in dict.fromkeys(_first_units(trace, steady, leanest, share) for share in _STAYING_SHARES):
        away = away_from(steady, trace.modules, blocks, MIN_PARAMETER_BYTES, staying=staying)
        found.append(
            ParameterPlacement(
                tier="disk",
                blocks=blocks,
                staying=staying,
                window_bytes=_window_of(steady),
                min_bytes=MIN_PARAMETER_BYTES,
                written_bytes=away.gradient_bytes * trace.num_micro_batches + _stepped_bytes(away, leanest),
                read_bytes=sum(_read_bytes(trace, away, _stepped_bytes(away, leanest)).values()),
                saved_bytes=away.parameter_bytes + away.gradient_bytes,
                cost_seconds=_seconds(trace, steady, away, _stepped_bytes(away, leanest)),
            )
        )
    return tuple(found)


def _first_units(trace: Trace, steady: Step, away: Away, share: float) -> tuple[str, ...]:
    """The units that come first in the model, with at least so much of the parameters that can leave."""
    found: list[str] = []
    left_bytes = share * away.parameter_bytes
    for unit in sorted({unit for units in away.users.values() for unit in units}):
        if left_bytes <= 0:
            break
        found.append(trace.modules[unit].path)
        # A tied parameter is counted with the first of its units.
        left_bytes -= sum(steady.storages[i].nbytes for i, units in away.users.items() if unit == min(units))
    return tuple(found)


def _stepped_bytes(away: Away, leanest: Away) -> int:
    """Of the parameters that leave, what a step reads and writes; a trace does not know which of them are trained."""
    return away.gradient_bytes * away.parameter_bytes // max(1, leanest.parameter_bytes)


def streamed(trace: Trace, step: Step, placement: ParameterPlacement) -> Step:
    """The step under a placement."""
    return with_parameters_on_disk(
        step, trace.modules, _away(trace, step, placement), window_bytes=placement.window_bytes
    )


def as_streamed(step: Step, modules: Sequence[Module]) -> Step:
    """The step with all parameters on disk that can be, as they are while a step is recorded."""
    away = away_from(step, modules, streamed_blocks(modules), MIN_PARAMETER_BYTES)
    return with_parameters_on_disk(step, modules, away, window_bytes=_window_of(step)) if away.users else step


def streamed_bytes(trace: Trace, step: Step, placement: ParameterPlacement) -> int:
    """The most that is in memory at once, outside the tensor heap, of what a placement has on disk."""
    return paged_bytes(step, trace.modules, _away(trace, step, placement), window_bytes=placement.window_bytes)


def built_bytes(trace: Trace, placement: ParameterPlacement, *, is_built_there: bool) -> int:
    """What the process holds before parameters are on disk: all of them, and one that waits to be written.

    Args:
        is_built_there: they leave as they are made, so that some are in memory at a time.
    """
    sizes = [s.nbytes for s in trace.steps[0].storages if s.category == "parameter"]
    largest_bytes = max(sizes, default=0)
    if is_built_there:
        return trace.base_bytes + passing_bytes(placement.window_bytes, largest_bytes)
    return trace.base_bytes + sum(sizes) + placement.window_bytes + largest_bytes


def passing_bytes(window_bytes: int, largest_bytes: int) -> int:
    """The most that parameters take which leave as they are made.

    Of one window wait those that have just been made, of another those that are written. Beside both there is one that
    has no numbers yet, what it gets them from (`0.02 * torch.randn(...)`), and the copy of one that leaves.
    """
    return 2 * window_bytes + 3 * largest_bytes


def _window_of(step: Step) -> int:
    return parameter_window_bytes(sum(s.nbytes for s in step.storages if s.category == "parameter"))


def _away(trace: Trace, step: Step, placement: ParameterPlacement) -> Away:
    return away_from(step, trace.modules, placement.blocks, placement.min_bytes, staying=placement.staying)


def _read_bytes(trace: Trace, away: Away, stepped_bytes: int) -> dict[str, int]:
    """What each phase of an optimizer step reads."""
    num_passes = trace.num_micro_batches
    return {
        "forward": num_passes * away.parameter_bytes,
        "backward": num_passes * away.parameter_bytes + (num_passes - 1) * away.gradient_bytes,
        "optimizer": away.gradient_bytes + stepped_bytes,
    }


def _seconds(trace: Trace, steady: Step, away: Away, stepped_bytes: int) -> float:
    """What a step takes longer than with parameters and gradients in memory.

    Args:
        stepped_bytes: of the parameters that leave, what the optimizer's step reads and writes.

    The disk either reads or writes. Parameters are read in each forward and each backward, beside which gradients are
    written; what these phases compute hides that as far as it goes. The optimizer's own transfers overlap with those of
    its state, which hide behind it already: nothing is left to hide these. What is read arrives in pages that become
    resident anew, on the cores that compute; a gradient is copied to where it is written from.
    """
    machine, num_passes = trace.machine, trace.num_micro_batches
    per_read, per_write = 1 / machine.disk_read_bytes_per_second, 1 / machine.disk_write_bytes_per_second
    num_cores = max(1, trace.num_threads)
    computing = {"forward": 0.0, "backward": 0.0}
    for op in steady.ops:
        if op.phase in computing:
            computing[op.phase] += op.seconds
    written_bytes = num_passes * away.gradient_bytes
    read_bytes = _read_bytes(trace, away, stepped_bytes)
    arriving_seconds = per_read + machine.heap_fault_seconds_per_byte / num_cores
    seconds = read_bytes["optimizer"] * arriving_seconds + stepped_bytes * per_write
    seconds += written_bytes * machine.copy_seconds_per_byte
    for phase, computed in computing.items():
        out_bytes = written_bytes if phase == "backward" else 0
        disk_seconds = read_bytes[phase] * per_read + out_bytes * per_write
        cpu_seconds = (read_bytes[phase] + out_bytes) * CPU_SECONDS_PER_BYTE
        cpu_seconds += read_bytes[phase] * machine.heap_fault_seconds_per_byte
        seconds += max(disk_seconds - computed, cpu_seconds / num_cores)
    return seconds
