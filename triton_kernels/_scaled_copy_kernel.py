"""The Triton half of `scaled_copy`. Needs triton."""

import torch
import triton
import triton.language as tl

from ._configs import scaled_copy_launch
from ._launch import is_interpreting, on_device, warp_size
from ._store import store_rounded


@triton.jit
def scaled_copy_kernel(
    source_ptr, factor_ptr, result_ptr, num_elements, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Computes source * factor, all of them flat, the product in fp32 and rounded once."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    mask = lanes < tl.cast(num_elements, tl.int64) - begin
    factor = tl.load(factor_ptr).to(tl.float32)
    values = tl.load(source_ptr + begin + lanes, mask=mask, other=0.0).to(tl.float32)
    store_rounded(result_ptr + begin + lanes, values * factor, mask, INTERPRETED)


def launch_scaled_copy(source: torch.Tensor, factor: torch.Tensor, result: torch.Tensor) -> None:
    """Fills the contiguous `result` with the contiguous `source` times the scalar `factor`."""
    launch = scaled_copy_launch(warp_size(source))
    with on_device(source):
        scaled_copy_kernel[(triton.cdiv(source.numel(), launch.block),)](
            source,
            factor,
            result,
            source.numel(),
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
