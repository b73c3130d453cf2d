"""Where what stands between steps may be, and how: the optimizer's state, and with it the parameters."""

from collections.abc import Sequence
from typing import NamedTuple

from memwall.planning.actions import Action, LowBitState, OptimizerPlacement, ParameterPlacement
from memwall.planning.legality import can_move_optimizer_state
from memwall.planning.parameters import parameter_placements, streamed
from memwall.planning.placement import MIN_STATE_BYTES, cpu_step, optimizer_placements, placed
from memwall.predict.cpu_step import gradient_bytes, staging_bytes
from memwall.predict.low_bit_state import with_low_bit_state
from memwall.predict.state_on_disk import movable_state_bytes
from memwall.trace.records import Step, Trace

__all__ = ["IN_MEMORY", "Place", "parameters_away", "place_step", "state_away", "stepped_on_cpu"]


class Place(NamedTuple):
    """Where state and parameters are; None for memory."""

    state: OptimizerPlacement | None = None
    parameters: ParameterPlacement | None = None
    """Only where state is away, too."""
    low_bit: LowBitState | None = None
    """State in memory, with fewer digits."""
    staging_bytes: int = 0
    """Where the CPU steps: host memory through which parameters and gradients pass."""
    lowered_bytes: int = 0
    """Where the CPU steps: parameters and gradients that come down in a step."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """In the order in which they are applied."""
        return tuple(action for action in (self.parameters, self.state, self.low_bit) if action is not None)

    @property
    def seconds(self) -> float:
        """What a step takes longer."""
        return sum(action.cost_seconds or 0.0 for action in self.actions)

    @property
    def away_bytes(self) -> int:
        """What has its place on the next tier."""
        return sum(action.saved_bytes or 0 for action in (self.state, self.parameters) if action is not None)

    @property
    def held_bytes(self) -> int:
        """What the next tier holds."""
        return self.away_bytes + self.staging_bytes

    @property
    def written_bytes(self) -> int:
        """What each step writes: state once, parameters once, gradients as often as they are added to.

        Where the CPU steps, state stays and they come down in its stead.
        """
        passes = self.state is not None and self.state.stepped_on != "cpu"
        state_bytes = (self.state.saved_bytes or 0) if self.state is not None and passes else 0
        return self.lowered_bytes + state_bytes + (0 if self.parameters is None else self.parameters.written_bytes)

    @property
    def read_bytes(self) -> int:
        """What each step reads back; where the CPU steps, parameters go up."""
        if self.state is not None and self.state.stepped_on == "cpu":
            return self.lowered_bytes // 2
        state_bytes = 0 if self.state is None else self.state.saved_bytes or 0
        return state_bytes + (0 if self.parameters is None else self.parameters.read_bytes or 0)


IN_MEMORY = Place()


def state_away(trace: Trace, steady: Step, *, capacity_bytes: int) -> tuple[Place, ...]:
    """Ways to have the optimizer's state on the next tier, the leanest one first; none where that is not legal."""
    return tuple(Place(state) for state in optimizer_placements(trace, steady, capacity_bytes=capacity_bytes))


def stepped_on_cpu(trace: Trace, steady: Step, *, capacity_bytes: int, allow: tuple[str, ...]) -> tuple[Place, ...]:
    """The way to have a device's state in host memory and step it there, if that is legal."""
    found = cpu_step(trace, steady, capacity_bytes=capacity_bytes, allow=allow)
    if found is None:
        return ()
    staged_bytes, lowered_bytes = staging_bytes(steady, found.bucket_bytes), 2 * gradient_bytes(steady)
    return (Place(found, staging_bytes=staged_bytes, lowered_bytes=lowered_bytes),)


def parameters_away(
    trace: Trace, steady: Step, places: Sequence[Place], *, capacity_bytes: int
) -> tuple[Place, ...] | str:
    """The leanest of these ways with gradients on disk as well, and ever more parameters; or why that is not legal.

    No reason, "", where not even moving the state would free anything: the model is small.
    """
    if not places or places[0].state is None:
        state_bytes = movable_state_bytes(steady, MIN_STATE_BYTES)
        reason = can_move_optimizer_state(trace, state_bytes, capacity_bytes)
        return f"they go to disk only where the optimizer's state goes as well, and {reason}" if reason else ""
    found = parameter_placements(trace, steady, places[0].state, capacity_bytes=capacity_bytes)
    return found if isinstance(found, str) else tuple(places[0]._replace(parameters=each) for each in found)


def place_step(trace: Trace, step: Step, place: Place) -> Step:
    """The step with state and parameters there."""
    if place.state is not None:
        step = placed(step, place.state)
    if place.low_bit is not None:
        step = with_low_bit_state(step)
    return step if place.parameters is None else streamed(trace, step, place.parameters)
