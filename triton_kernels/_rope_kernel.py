"""The Triton half of `rope`. Needs triton. One program rotates one token of several heads, in fp32."""

import triton
import triton.language as tl
from torch import Tensor

from ._configs import rope_launch
from ._launch import is_interpreting, on_device, warp_size
from ._store import store_rounded

__all__ = ["launch_rope", "rope_kernel"]


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    result_ptr,
    num_heads,
    num_tokens,
    num_pairs,
    num_columns,
    num_head_blocks,
    x_batch_stride,
    x_head_stride,
    x_token_stride,
    x_column_stride,
    cos_batch_stride,
    cos_token_stride,
    cos_column_stride,
    sin_batch_stride,
    sin_token_stride,
    sin_column_stride,
    result_batch_stride,
    result_head_stride,
    result_token_stride,
    result_column_stride,
    sin_sign,
    INTERLEAVED: tl.constexpr,
    COPIES_REST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """`result` may be `x`: each lane writes what it alone has read."""
    program = tl.program_id(0).to(tl.int64)
    position = program // num_head_blocks
    batch = position // num_tokens
    token = position - batch * num_tokens
    heads = ((program - position * num_head_blocks) * HEADS + tl.arange(0, HEADS))[:, None]
    x_ptr += batch * x_batch_stride + token * x_token_stride
    result_ptr += batch * result_batch_stride + token * result_token_stride
    x_heads = x_ptr + heads * x_head_stride
    result_heads = result_ptr + heads * result_head_stride

    lanes = tl.arange(0, PAIRS)
    cos_ptrs = cos_ptr + batch * cos_batch_stride + token * cos_token_stride + lanes * cos_column_stride
    sin_ptrs = sin_ptr + batch * sin_batch_stride + token * sin_token_stride + lanes * sin_column_stride
    cos = tl.load(cos_ptrs, mask=lanes < num_pairs, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptrs, mask=lanes < num_pairs, other=0.0).to(tl.float32)[None, :] * sin_sign
    if INTERLEAVED:
        # Whole rows, which are loaded as wide as can be; their pairs are told apart in registers.
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        mask = (heads < num_heads) & (columns < 2 * num_pairs)
        pairs = tl.load(x_heads + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, (HEADS, PAIRS, 2)))
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
        results = result_heads + columns * result_column_stride
        store_rounded(results, tl.reshape(rotated, (HEADS, 2 * PAIRS)), mask, INTERPRETED)
    else:
        columns = lanes[None, :]
        mask = (heads < num_heads) & (columns < num_pairs)
        first = tl.load(x_heads + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_heads + (columns + num_pairs) * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        store_rounded(result_heads + columns * result_column_stride, first * cos - second * sin, mask, INTERPRETED)
        others = result_heads + (columns + num_pairs) * result_column_stride
        store_rounded(others, second * cos + first * sin, mask, INTERPRETED)
    if COPIES_REST:
        columns = (2 * num_pairs + tl.arange(0, REST))[None, :]
        mask = (heads < num_heads) & (columns < num_columns)
        rest = tl.load(x_heads + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        store_rounded(result_heads + columns * result_column_stride, rest, mask, INTERPRETED)


def launch_rope(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor, *, interleaved: bool, is_inverse: bool) -> None:
    """`reference_rope` in Triton."""
    num_batches, num_heads, num_tokens, num_columns = x.shape
    num_pairs = cos.shape[2]
    num_rest = num_columns - 2 * num_pairs
    launch = rope_launch(num_heads, num_pairs, warp_size(x))
    num_head_blocks = triton.cdiv(num_heads, launch.block)
    with on_device(x):
        rope_kernel[(num_batches * num_tokens * num_head_blocks,)](
            x,
            cos,
            sin,
            result,
            num_heads,
            num_tokens,
            num_pairs,
            num_columns,
            num_head_blocks,
            *x.stride(),
            *cos.stride(),
            *sin.stride(),
            *result.stride(),
            -1.0 if is_inverse else 1.0,
            INTERLEAVED=interleaved,
            COPIES_REST=num_rest > 0 and x.data_ptr() != result.data_ptr(),
            INTERPRETED=is_interpreting(),
            HEADS=launch.block,
            PAIRS=triton.next_power_of_2(max(1, num_pairs)),
            REST=triton.next_power_of_2(max(1, num_rest)),
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
