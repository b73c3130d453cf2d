"""Foresees what a run holds while it evaluates under a plan, which says where state and parameters are."""

from collections.abc import Sequence

from memwall.planning.action import Action
from memwall.planning.step_under_plan import step_under_actions
from memwall.predict.evaluation import evaluation_bytes
from memwall.predict.first_step import FirstStep
from memwall.trace.records import Step, Trace


def evaluation_under_actions(trace: Trace, steady: Step, actions: Sequence[Action], first: FirstStep) -> int:
    """Returns the process bytes of the evaluation that is known of, or of one with a step's samples, on a CPU.

    Args:
        steady: the recorded step that counts.
        actions: those of a plan; of these, where state and parameters are makes a difference.
    """
    return evaluation_bytes(
        trace,
        step_under_actions(trace, steady, actions),
        batch=first.evaluation_batch or trace.micro_batch,
        keeps_gradients=first.evaluates_with_gradients,
        may_lack_autocast=first.has_average,
    )
