"""`scaled_copy`: a gradient times the upstream gradient, which is known only on the device, cast in the same pass.

Plain `gradient * factor` rounds the factor to the gradient's dtype first: every bf16 gradient would carry the rounding
error of 1 / num_items. Reads and writes each element once, needs no temporary and no host synchronisation.
"""

import torch
from torch import Tensor

from ._rows import compute_dtype, row_slices


@torch.library.custom_op("memwall::scaled_copy", mutates_args=())
def scaled_copy(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `source * factor` in `dtype`, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        source: contiguous, any shape.
        factor: one element on the same device.
        dtype: of the result.
    """
    result = torch.empty(source.shape, dtype=dtype, device=source.device)
    wide = factor.reshape(1).to(compute_dtype(source.dtype))  # of one dimension, or the source's dtype would be taken
    flat_source, flat_result = source.view(-1), result.view(-1)
    if source.is_cuda:  # one pass, which widens and rounds each element itself
        torch.mul(flat_source, wide, out=flat_result)
        return result
    for part in row_slices(source.numel(), 1):
        flat_result[part] = flat_source[part] * wide
    return result


@scaled_copy.register_fake
def _(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(source.shape, dtype=dtype, device=source.device)
