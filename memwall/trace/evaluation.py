"""Records an evaluation after the training steps it follows, with what stands in memory then."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import nn

from memwall.errors import MemwallError
from memwall.trace.fake import fake_run
from memwall.trace.op_work import OpWork
from memwall.trace.records import Trace
from memwall.trace.spec import describe_error
from memwall.trace.trace_builder import TraceBuilder, run_recorded
from memwall.trace.workload import Workload
from memwall.trace.workspaces import Workspaces

__all__ = ["MOST_MICRO_BATCHES", "RecordedRun", "record_fake_run", "run_evaluated"]

# The second micro-batch finds the first one's gradients; all further ones are like it.
MOST_MICRO_BATCHES = 2
_NUM_STEPS = 2


class RecordedRun(Struct, frozen=True, kw_only=True):
    """Holds training steps, and the evaluation after them."""

    training: Trace
    evaluation: Trace | None
    """A trace of one step, the evaluation of one batch; None where that failed."""
    failure: str = ""
    """Why there is no evaluation."""


def record_fake_run(
    workload: Workload,
    eval_batch: Callable[[], Any],
    *,
    num_micro_batches: int = 1,
    seconds_of: Callable[[OpWork], float] | None = None,
    mask_share: float | None = None,
    workspaces: Workspaces | None = None,
    choices: AbstractContextManager[object] | None = None,
) -> RecordedRun:
    """Records two training steps and an evaluation on fake tensors, for a CUDA device.

    Args:
        eval_batch: makes the batch that is evaluated.
        num_micro_batches: forwards and backwards in a step; at most two are recorded, since further ones are alike.
        seconds_of, mask_share, workspaces, choices: as in `memwall.trace.fake.fake_run`.

    Raises:
        TraceError: the workload does not run a whole training step, or needs values that fake tensors don't have.
        UsageError: `mask_share` is no share.
    """
    with fake_run(
        workload,
        [workload.make_batch, eval_batch],
        seconds_of=seconds_of,
        target="cuda",
        mask_share=mask_share,
        workspaces=workspaces,
        choices=choices,
    ) as run:
        batch, evaluated = run.batches
        training = run_recorded(
            run.builder,
            workload,
            run.model,
            run.optimizer,
            batch,
            num_steps=_NUM_STEPS,
            num_micro_batches=min(num_micro_batches, MOST_MICRO_BATCHES),
        )
        try:
            evaluation = run_evaluated(run.builder, workload, run.model, run.optimizer, evaluated)
        except Exception as error:  # whatever a model's own code raises; the training steps stand all the same
            failure = str(error) if isinstance(error, MemwallError) else describe_error(error)
            return RecordedRun(training=training, evaluation=None, failure=failure)
    return RecordedRun(training=training, evaluation=evaluation)


def run_evaluated(
    builder: TraceBuilder, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Trace:
    """Returns the trace of one evaluation: the loss of a batch, without gradients, beside the optimizer's state.

    What the model returns is let go once its loss is there, as the Trainer of transformers does where it computes no
    metrics (trainer.py, `prediction_step` with `prediction_loss_only`). The model stays in evaluation mode.

    Args:
        builder: has recorded the training steps before.

    Raises:
        TraceError: the workload's loss does not call the model.
    """
    model.eval()
    builder.start_step(optimizer)
    try:
        with torch.no_grad():
            workload.loss(model, batch)
        step = builder.finish_step(optimizer, is_evaluation=True)
    finally:
        builder.cancel_step()
    return msgspec.structs.replace(builder.trace(optimizer), steps=(step,))
