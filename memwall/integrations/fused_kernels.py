"""A workload recorded with fused kernels in its model: what a plan that may use them is made from."""

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from memwall.apply.kernels import PatchedKernels, objection, patch_kernels
from memwall.apply.kernels_head import chunk_rows_of
from memwall.apply.kernels_match import Candidate
from memwall.plan.actions import FusedKernels
from memwall.plan.fused import kernels_in
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

__all__ = ["recorded_with_kernels", "without_comparison"]

_log = logging.getLogger(__name__)

Recorded = tuple[Trace, FusedKernels | None]


def without_comparison(module: nn.Module, candidate: Candidate) -> str | None:
    """Objects to a second kernel only: on fake tensors structure proposes, and whoever applies the plan compares."""
    return "its forward was replaced already" if "forward" in module.__dict__ else None


def recorded_with_kernels(
    record: Callable[[Callable[[Workload], Workload]], Trace],
    objection: Callable[[nn.Module, Candidate], str | None] = objection,
) -> Recorded:
    """The trace of a workload whose model runs fused kernels, and what there is of them; None if no module has one.

    Args:
        record: records the workload that its argument makes of a plain one.
        objection: what speaks against a kernel; see `memwall.apply.kernels.patch_kernels`.
    """
    made: list[PatchedKernels] = []
    chunk_rows = 0

    def changed(workload: Workload) -> Workload:
        def model() -> nn.Module:
            nonlocal chunk_rows
            plain = workload.make_model()
            chunk_rows = chunk_rows_of(plain)
            made.append(patch_kernels(plain, chunk_rows=chunk_rows, objection=objection))
            return plain

        return replace(workload, model=model)

    try:
        trace = record(changed)
    finally:
        for patched in reversed(made):
            patched.undo()
    found = kernels_in(trace, chunk_rows)
    if found is None and any(patched.num_replaced for patched in made):
        _log.warning("none of the fused kernels put into the model ran in the recorded step; the plan has none")
    return trace, found
