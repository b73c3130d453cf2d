"""Parameters and gradients on the next tier between their uses; goes with optimizer state there, as the last resort."""

from collections.abc import Iterator, Sequence
from typing import Literal

from memwall.planning.action import Action
from memwall.planning.location import Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.paths import block_ranges
from memwall.planning.technique import Technique, technique_of
from memwall.predict.parameters_on_disk import Away, away_from, paged_bytes, streamed_blocks, with_parameters_on_disk
from memwall.predict.state_on_disk import CPU_SECONDS_PER_BYTE
from memwall.trace.records import Module, Step, Trace
from memwall.units import format_bytes

MIN_PARAMETER_BYTES = 256 << 10
"""Smaller parameters stay in memory with their gradients: norms and biases, as a rule."""
# What is stepped at a time: enough to keep a disk busy; of few parameters a part that is little beside them.
_WINDOW_BYTES = 32 << 20
_MIN_WINDOW_BYTES = 1 << 20
_WINDOW_SHARE = 1 / 32
# Parts of the parameters that may stay in memory where their gradients cannot.
_STAYING_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


class ParameterPlacement(Action, frozen=True, kw_only=True, tag="parameter-placement"):
    """Keeps parameters and gradients on the next tier between their uses; goes with optimizer state there."""

    tier: Literal["disk", "host"]
    """"host" is pinned memory, for parameters on CUDA; below a CPU's memory is "disk"."""
    blocks: tuple[str, ...]
    """Modules whose parameters are brought in as one; outside them each module with parameters is one by itself."""
    staying: tuple[str, ...] = ()
    """Paths of modules whose parameters stay in memory: only their gradients leave."""
    window_bytes: int
    """Parameters stepped at a time, and what may wait to be written; one parameter may always."""
    min_bytes: int
    """Smaller parameters stay in memory, with their gradients."""
    written_bytes: int
    """Bytes of parameters and gradients that a step writes."""
    read_bytes: int | None = None
    """Bytes of them that a step reads; None in files written before that was counted."""


class _Parameters(Technique[ParameterPlacement]):
    record = ParameterPlacement
    order = 10
    step_rank = 3
    uses_tier = True
    choice = "last-resort"

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        """Returns gradients on the next tier, and parameters: none of them first, all at last."""
        trace, steady = inputs.trace, inputs.steady
        settings = inputs.settings
        kept = (technique_of(action).keeps_parameters for action in settings.standing)
        reason = settings.parameters_stay or next((reason for reason in kept if reason), "")
        next_tier = trace.machine.next_tier
        if reason or next_tier is None:
            return reason
        if isinstance(ordinary, str):
            return (
                f"they go to {next_tier.name} only where the optimizer's state goes as well, and {ordinary}"
                if ordinary
                else ""
            )
        if not ordinary:
            return ""
        blocks = streamed_blocks(trace.modules)
        leanest = away_from(steady, trace.modules, blocks, MIN_PARAMETER_BYTES)
        leaving_bytes = leanest.parameter_bytes + leanest.gradient_bytes
        away_bytes = leaving_bytes + ordinary[0].away_bytes if leanest.users else 0
        refusal = can_move_parameters(trace, away_bytes, inputs.capacity_bytes)
        if refusal is not None:
            return refusal
        found = []
        for staying in dict.fromkeys(_first_units(trace, steady, leanest, share) for share in _STAYING_SHARES):
            away = away_from(steady, trace.modules, blocks, MIN_PARAMETER_BYTES, staying=staying)
            stepped_bytes = _stepped_bytes(away, leanest)
            action = ParameterPlacement(
                tier=next_tier.name,
                blocks=blocks,
                staying=staying,
                window_bytes=_window_of(steady),
                min_bytes=MIN_PARAMETER_BYTES,
                written_bytes=away.gradient_bytes * trace.num_micro_batches + stepped_bytes,
                read_bytes=sum(_read_bytes(trace, away, stepped_bytes).values()),
                saved_bytes=away.parameter_bytes + away.gradient_bytes,
                cost_seconds=_seconds(trace, steady, away, stepped_bytes),
            )
            found.append(_location(inputs, action))
        return tuple(found)

    def step(self, trace: Trace, step: Step, action: ParameterPlacement) -> Step:
        away = _away(trace, step, action)
        return with_parameters_on_disk(step, trace.modules, away, window_bytes=action.window_bytes)

    def evaluation(self, trace: Trace, step: Step, action: ParameterPlacement) -> Step:
        return self.step(trace, step, action)

    def what(self, action: ParameterPlacement) -> str:
        return f"parameters and gradients to {action.tier}"

    def where(self, actions: Sequence[ParameterPlacement]) -> str:
        staying = actions[0].staying
        return "between uses" + (f"; parameters stay in {block_ranges(staying)}" if staying else "")

    def lever(self, action: ParameterPlacement) -> str:
        return f"parameters and gradients to {action.tier}"

    def binding(self, trace: Trace, actions: Sequence[ParameterPlacement]) -> Iterator[str]:
        for action in actions:
            yield (
                f"{format_bytes(action.saved_bytes or 0)} of parameters and gradients are "
                f"{'on disk' if action.tier == 'disk' else 'in host memory'} between their uses: parameters are read "
                f"in each forward, backward and optimizer step, {format_bytes(action.written_bytes)} are written"
                + (f"; the parameters of {len(action.staying)} modules stay in memory" if action.staying else "")
            )

    def host_parameter_bytes(self, action: ParameterPlacement) -> int:
        return (action.saved_bytes or 0) if action.tier == "host" else 0


TECHNIQUE = _Parameters()


def can_move_parameters(trace: Trace, away_bytes: int, capacity_bytes: int) -> str | None:
    """Returns None if parameters and gradients can be on the next tier, once the optimizer's state is, else why not.

    Args:
        away_bytes: bytes that would be there: parameters, gradients and state.
        capacity_bytes: bytes that the next tier may be used for.
    """
    if trace.device not in ("cpu", "cuda"):
        return f"parameters move from CPU and CUDA memory only; the trace is of device '{trace.device}'"
    if trace.autocast != "none":
        return f"autocast to {trace.autocast} keeps copies of parameters in memory through a whole forward"
    if away_bytes == 0:
        return "no parameter is large enough to move, and used by its own module alone"
    if away_bytes > capacity_bytes:
        return (
            f"parameters, gradients and optimizer state need {format_bytes(away_bytes)} of "
            f"{'disk' if trace.device == 'cpu' else 'host memory'}, there are {format_bytes(capacity_bytes)}"
        )
    return None


def parameter_window_bytes(parameter_bytes: int) -> int:
    """Returns the window for so many bytes of parameters."""
    return min(max(int(parameter_bytes * _WINDOW_SHARE), _MIN_WINDOW_BYTES), _WINDOW_BYTES)


def _location(inputs: SearchInputs, action: ParameterPlacement) -> Location:
    trace, steady = inputs.trace, inputs.steady
    sizes = [s.nbytes for s in trace.steps[0].storages if s.category == "parameter"]
    largest_bytes = max(sizes, default=0)
    # Parameters that leave as they are made are in memory a few at a time; others all are, until they leave: those of a
    # CPU through copies, of a device from where they lie.
    is_built_there = inputs.settings.is_built_on_disk
    if is_built_there:
        building_bytes = passing_bytes(action.window_bytes, largest_bytes)
    else:
        building_bytes = sum(sizes) + (action.window_bytes + largest_bytes if trace.device == "cpu" else 0)
    away = _away(trace, steady, action)
    first = inputs.settings.first_step
    return Location(
        actions=(action,),
        away_bytes=action.saved_bytes or 0,
        written_bytes=action.written_bytes,
        read_bytes=action.read_bytes or 0,
        # Other models' parameters that were built on disk stay there beside them, and nowhere else.
        grown_bytes=-(first.others_bytes if first is not None and is_built_there else 0),
        built_bytes=inputs.process.base_bytes + building_bytes,
        paged_bytes=(
            paged_bytes(steady, trace.modules, away, window_bytes=action.window_bytes) if trace.device == "cpu" else 0
        ),
        keeps_tier_busy=True,
    )


def as_streamed(step: Step, modules: Sequence[Module]) -> Step:
    """Returns the step with all parameters on disk that can be, as they are while a step is recorded."""
    away = away_from(step, modules, streamed_blocks(modules), MIN_PARAMETER_BYTES)
    return with_parameters_on_disk(step, modules, away, window_bytes=_window_of(step)) if away.users else step


def _first_units(trace: Trace, steady: Step, away: Away, share: float) -> tuple[str, ...]:
    """Returns the units that come first in the model, with at least so much of the parameters that can leave."""
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
    """Returns the bytes of leaving parameters that a step writes; a trace does not know which are trained."""
    return away.gradient_bytes * away.parameter_bytes // max(1, leanest.parameter_bytes)


def passing_bytes(window_bytes: int, largest_bytes: int) -> int:
    """Returns the most that parameters take which leave as they are made.

    Of one window wait those that have just been made, of another those that are written. Beside both there is one that
    has no numbers yet, what it gets them from (`0.02 * torch.randn(...)`), and the copy of one that leaves.
    """
    return 2 * window_bytes + 3 * largest_bytes


def _window_of(step: Step) -> int:
    return parameter_window_bytes(sum(s.nbytes for s in step.storages if s.category == "parameter"))


def _away(trace: Trace, step: Step, placement: ParameterPlacement) -> Away:
    return away_from(step, trace.modules, placement.blocks, placement.min_bytes, staying=placement.staying)


def _read_bytes(trace: Trace, away: Away, stepped_bytes: int) -> dict[str, int]:
    """Returns the bytes that each phase of an optimizer step reads."""
    num_passes = trace.num_micro_batches
    return {
        "forward": num_passes * away.parameter_bytes,
        "backward": num_passes * away.parameter_bytes + (num_passes - 1) * away.gradient_bytes,
        "optimizer": away.gradient_bytes + stepped_bytes,
    }


def _seconds(trace: Trace, steady: Step, away: Away, stepped_bytes: int) -> float:
    """Returns how much longer a step takes than with parameters and gradients in memory.

    Args:
        stepped_bytes: of the parameters that leave, what the optimizer's step reads and writes.

    A disk, or a link to host memory, either reads or writes. Parameters are read in each forward and each backward,
    beside which gradients are written; what these phases compute hides that as far as it goes. The optimizer's own
    transfers overlap with those of its state, which hide behind it already: nothing is left to hide these. What is read
    arrives in pages that become resident anew, on the cores that compute; a gradient is copied to where it is written
    from. A device does neither.
    """
    machine, tier, num_passes = trace.machine, trace.machine.next_tier, trace.num_micro_batches
    assert tier is not None
    per_read, per_write = 1 / tier.read_bytes_per_second, 1 / tier.write_bytes_per_second
    num_cores, is_on_cpu = max(1, trace.num_threads), trace.device == "cpu"
    fault_seconds = machine.heap_fault_seconds_per_byte if is_on_cpu else 0.0
    computing = {"forward": 0.0, "backward": 0.0}
    for op in steady.ops:
        if op.phase in computing:
            computing[op.phase] += op.seconds
    written_bytes = num_passes * away.gradient_bytes
    read_bytes = _read_bytes(trace, away, stepped_bytes)
    arriving_seconds = per_read + fault_seconds / num_cores
    seconds = read_bytes["optimizer"] * arriving_seconds + stepped_bytes * per_write
    seconds += written_bytes * machine.copy_seconds_per_byte if is_on_cpu else 0.0
    for phase, computed in computing.items():
        out_bytes = written_bytes if phase == "backward" else 0
        disk_seconds = read_bytes[phase] * per_read + out_bytes * per_write
        cpu_seconds = (read_bytes[phase] + out_bytes) * (CPU_SECONDS_PER_BYTE if is_on_cpu else 0.0)
        cpu_seconds += read_bytes[phase] * fault_seconds
        seconds += max(disk_seconds - computed, cpu_seconds / num_cores)
    return seconds
