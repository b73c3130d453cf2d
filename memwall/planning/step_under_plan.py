"""The step that a plan makes of a trace: what runs, recomputed operations and second lives included."""

from collections.abc import Sequence

from memwall.planning.action import Action
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.technique import technique_of
from memwall.predict.call_rules import Treatment
from memwall.predict.evaluation import evaluation_bytes
from memwall.predict.first_step import FirstStep
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step


def step_under_plan(trace: Trace, plan: Plan) -> Step:
    """Returns the steady step of a trace under a plan made from it."""
    step = step_under_actions(trace, steady_step(trace), plan.actions)
    treatments: dict[str, Treatment] = {}
    for action in plan.actions:
        block = getattr(action, "block", None)
        if block is not None:
            treatments[block] = technique_of(action).treatment(action, treatments.get(block, Treatment()))
    return StepModel(step, trace.names, find_blocks(trace, step)).treated(treatments)


def step_under_actions(trace: Trace, step: Step, actions: Sequence[Action]) -> Step:
    """Returns a step under actions, as far as they do not treat single blocks."""
    for action in sorted(actions, key=lambda action: technique_of(action).step_rank):
        step = technique_of(action).step(trace, step, action)
    return step


def evaluation_under_actions(
    trace: Trace, steady: Step, actions: Sequence[Action], first: FirstStep, *, is_called: bool = False
) -> int:
    """Returns the process bytes of the evaluation that is known of, or of one with a step's samples, on a CPU.

    Args:
        steady: the recorded step that counts.
        actions: those of a plan; of these, where state and parameters are makes a difference.
        is_called: whether one that the script's text calls for counts as well.
    """
    called_batch, growth = (first.called_batch, first.called_growth) if is_called else (0, 1.0)
    return evaluation_bytes(
        trace,
        step_under_actions(trace, steady, actions),
        batch=max(first.evaluation_batch, called_batch) or trace.micro_batch,
        growth=growth,
        keeps_gradients=first.evaluates_with_gradients,
        may_lack_autocast=first.has_average,
    )
