"""What techniques offer for a trace, asked one at a time, as the search asks them."""

from types import SimpleNamespace
from typing import Any

from memwall.planning.location import Location
from memwall.planning.settings import Settings
from memwall.planning.techniques import cpu_step, low_bit_state, optimizer_state, parameters
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

CAPACITY_BYTES = 1 << 40


def inputs(
    trace: Trace, steady: Step | None = None, *, capacity_bytes: int = CAPACITY_BYTES, **settings: Any
) -> SimpleNamespace:
    """The inputs of a search, with the recorded seconds of operations as they are."""
    return SimpleNamespace(
        trace=trace,
        steady=steady or steady_step(trace),
        settings=Settings(budget_bytes=0, **settings),
        capacity_bytes=capacity_bytes,
        process=SimpleNamespace(base_bytes=trace.base_bytes),
    )


def _locations(technique: Any, asked: SimpleNamespace, ordinary: tuple[Location, ...] | str = ()) -> Any:
    return technique.locations(asked, ordinary)


def state_placements(trace: Trace, steady: Step, *, capacity_bytes: int) -> tuple[OptimizerPlacement, ...]:
    """Ways to have the optimizer's state on the next tier; none where that is not legal."""
    found = _locations(optimizer_state.TECHNIQUE, inputs(trace, steady, capacity_bytes=capacity_bytes))
    return () if isinstance(found, str) else tuple(one.actions[0] for one in found)


def step_on_cpu(trace: Trace, steady: Step, *, capacity_bytes: int, allow: tuple[str, ...]) -> StepOnCpu | None:
    """The step on the CPU; None where it is not legal."""
    asked = inputs(trace, steady, capacity_bytes=capacity_bytes, allow=allow)
    found = _locations(cpu_step.TECHNIQUE, asked)
    return None if isinstance(found, str) or not found else found[0].actions[0]


def low_bits(trace: Trace, steady: Step) -> LowBitState:
    """The action that keeps moments in 8 bits."""
    found = _locations(low_bit_state.TECHNIQUE, inputs(trace, steady, allow=("low-bit-optimizer",)))
    action: LowBitState = found[0].actions[0]
    return action


def parameters_away(
    trace: Trace, *, capacity_bytes: int = CAPACITY_BYTES, **settings: Any
) -> tuple[Location, ...] | str:
    """Ways to have gradients on disk as well, and parameters; or why there are none."""
    ordinary = _locations(optimizer_state.TECHNIQUE, inputs(trace))
    found: tuple[Location, ...] | str = _locations(
        parameters.TECHNIQUE, inputs(trace, capacity_bytes=capacity_bytes, **settings), ordinary
    )
    return found
