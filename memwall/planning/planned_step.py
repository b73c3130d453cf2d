"""The step that a plan makes of a trace: what runs, recomputed operations and second lives included."""

from memwall.planning.actions import (
    Accumulate,
    LowBitState,
    Offload,
    OptimizerPlacement,
    ParameterPlacement,
    Rebuild,
    Recompute,
)
from memwall.planning.blocks import find_blocks
from memwall.planning.locations import Place, place_step
from memwall.planning.microbatch import with_micro_batch
from memwall.planning.planfile import Plan
from memwall.predict.call_rules import Treatment
from memwall.predict.treatment import StepModel
from memwall.trace.build import steady_step
from memwall.trace.records import Step, Trace

__all__ = ["planned_step"]


def _treatments_of(plan: Plan) -> dict[str, Treatment]:
    """Block path -> treatment, from a plan's actions."""
    recompute = {a.block: a for a in plan.actions if isinstance(a, Recompute)}
    rebuild = {a.block: a for a in plan.actions if isinstance(a, Rebuild)}
    offload = {a.block: a for a in plan.actions if isinstance(a, Offload)}
    return {
        block: Treatment(
            recompute=block in recompute,
            kept_ops=recompute[block].kept_ops if block in recompute else (),
            rebuild=block in rebuild,
            offload=block in offload,
            is_packed=block in offload and offload[block].form != "exact",
            **({"min_bytes": offload[block].min_bytes} if block in offload else {}),
        )
        for block in {**recompute, **rebuild, **offload}
    }


def planned_step(trace: Trace, plan: Plan) -> Step:
    """The steady step of a trace under a plan made from it."""
    state = next((action for action in plan.actions if isinstance(action, OptimizerPlacement)), None)
    parameters = next((action for action in plan.actions if isinstance(action, ParameterPlacement)), None)
    low_bit = next((action for action in plan.actions if isinstance(action, LowBitState)), None)
    step = place_step(trace, steady_step(trace), Place(state, parameters, low_bit))
    for action in plan.actions:
        if isinstance(action, Accumulate):
            step = with_micro_batch(trace, step, action.micro_batch)
    return StepModel(step, trace.names, find_blocks(trace, step)).treated(_treatments_of(plan))
