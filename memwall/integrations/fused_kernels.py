"""Records a workload with fused kernels in its model: a plan that may use them is made from that."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from memwall.apply.kernels.head import HEAD_KERNEL, chunk_rows_of
from memwall.apply.kernels.match import KernelMatch, candidates, disagreement
from memwall.apply.kernels.patched import PatchedKernels, objection, patch_kernels
from memwall.planning.techniques.kernels import FusedKernels, kernels_in
from memwall.torch_internals.dispatch import without_dispatch_modes
from memwall.torch_internals.modules import with_parameters
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

_log = logging.getLogger(__name__)

Recorded = tuple[Trace, FusedKernels | None]


def without_values(module: nn.Module, candidate: KernelMatch) -> str | None:
    """Says what speaks against a kernel for a module on fake tensors.

    A norm is compared with weights made up for it. Of a gated MLP they would be large: its structure and the values of
    its activation have to do, and whoever applies the plan compares.
    """
    if "forward" in module.__dict__:
        return "its forward was replaced already"
    if list(module.children()) or candidate.kernel == HEAD_KERNEL:
        return None
    with without_dispatch_modes():
        made = copy.copy(module)
        made_up = {
            name: nn.Parameter(torch.rand(p.shape, dtype=p.dtype) + 0.5)
            for name, p in module.named_parameters(recurse=False)
        }
        with_parameters(made, made_up)
        same = next(found for found in candidates(made) if found.kernel == candidate.kernel)
        return disagreement(made, same)


def recorded_with_kernels(
    record: Callable[[Callable[[Workload], Workload]], Trace],
    objection: Callable[[nn.Module, KernelMatch], str | None] = objection,
    *,
    is_told: bool = True,
) -> Recorded:
    """Returns the trace of a workload whose model runs fused kernels, and which; None for these if no module has one.

    Args:
        record: records the workload that its argument makes of a plain one.
        objection, is_told: see `memwall.apply.kernels.patched.patch_kernels`.
    """
    made: list[PatchedKernels] = []
    chunk_rows = 0

    def changed(workload: Workload) -> Workload:
        def model() -> nn.Module:
            nonlocal chunk_rows
            plain = workload.make_model()
            chunk_rows = chunk_rows_of(plain)
            made.append(patch_kernels(plain, chunk_rows=chunk_rows, objection=objection, is_told=is_told))
            return plain

        return replace(workload, model=model)

    try:
        trace = record(changed)
    finally:
        for patched in reversed(made):
            patched.undo()
    found = kernels_in(trace, chunk_rows)
    if is_told and found is None and any(patched.num_replaced for patched in made):
        _log.warning(
            "none of the fused kernels put into the model ran in the recorded step; the plan has none, so leave "
            "--allow kernels out"
        )
    return trace, found
