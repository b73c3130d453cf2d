"""Training steps recorded on fake tensors, for this CPU or for a CUDA device, to be compared with real ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from scratch_workspaces import ScratchWorkspaces

from memwall.trace.fake import fake_run
from memwall.trace.op_work import OpWork
from memwall.trace.records import Trace
from memwall.trace.trace_builder import run_recorded
from memwall.trace.workload import Workload
from memwall.trace.workspaces import Workspaces

__all__ = ["record_fake"]


def record_fake(
    workload: Workload,
    *,
    num_steps: int = 2,
    seconds_of: Callable[[OpWork], float] | None = None,
    target: Literal["cpu", "cuda"] = "cpu",
    mask_share: float | None = None,
    has_cpu_workspaces: bool = False,
    workspaces: Workspaces | None = None,
    choices: AbstractContextManager[object] | None = None,
) -> Trace:
    """Records the first steps of a workload without allocating its tensors: the first one, and steady ones after it.

    Args:
        seconds_of: seconds of an operation on the target; None leaves every time at 0.
        target: device type that torch's Python is to decide for: on CUDA optimizers default to foreach.
        has_cpu_workspaces: count what operators allocate for themselves on this CPU (convolutions: as much as a
            result); each is run once per set of shapes on small scratch tensors.
        mask_share: share of a mask's elements taken to be true where the step selects rows by one whose values hang
            on weights, as a mixture of experts does; None makes that an error.

    Raises:
        TraceError: the workload does not run a whole training step, or needs values that fake tensors don't have.
        UsageError: `mask_share` is no share.
    """
    if workspaces is None and has_cpu_workspaces:
        workspaces = ScratchWorkspaces()
    with fake_run(
        workload,
        [workload.make_batch],
        seconds_of=seconds_of,
        target=target,
        mask_share=mask_share,
        workspaces=workspaces,
        choices=choices,
    ) as run:
        (batch,) = run.batches
        return run_recorded(run.builder, workload, run.model, run.optimizer, batch, num_steps=num_steps)
