"""The Triton half of `softmax_cross_entropy`: the loss of each row of given logits, and its gradient. Needs triton.

One program per row. Forward reads it once; backward reads and writes it once, in place where the logits are its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._configs import row_loss_launch
from ._launch import is_interpreting, on_device, warp_size
from ._loss_terms import LossTerms
from ._row_softmax import row_sums, scaled_logits, tanh
from ._softmax_loss_reference import RowSums
from ._store import store_rounded

__all__ = ["launch_softmax_gradient", "launch_softmax_loss", "softmax_gradient_kernel", "softmax_loss_kernel"]


@triton.jit
def softmax_loss_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    largest_ptr,
    total_ptr,
    num_inner,
    outer_stride,
    inner_stride,
    column_stride,
    vocabulary,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    logit_scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Loss of one row of `logits [outer, inner, V]`, and what backward needs of it."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(largest_ptr + row, 0.0)
        tl.store(total_ptr + row, 1.0)
        return

    outer = row // num_inner
    logits_ptr += outer * outer_stride + (row - outer * num_inner) * inner_stride
    columns = tl.cast(vocabulary, tl.int64)
    is_target_valid = (target >= 0) & (target < columns)
    picked_ptr = logits_ptr + tl.where(is_target_valid, target, 0) * column_stride
    picked = scaled_logits(picked_ptr, is_target_valid, is_target_valid, logit_scale, softcap, HAS_SOFTCAP)
    # Sums of logits are taken from here: what all of them have in common must not drown the differences.
    origin = tl.where(picked == float("-inf"), 0.0, picked)
    shift, running_sum, plain_sum = row_sums(
        logits_ptr, column_stride, columns, columns, origin, logit_scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, BLOCK
    )
    log_sum = tl.log(running_sum)
    lse = shift + log_sum
    loss = (1.0 - label_smoothing) * ((shift - picked) + log_sum) + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss += label_smoothing * ((shift - origin) + log_sum - plain_sum / columns.to(tl.float32))
    # Out of range: this row is NaN, as torch has it on CUDA, and nothing is read out of bounds.
    tl.store(loss_ptr + row, tl.where(is_target_valid, loss, float("nan")))
    tl.store(largest_ptr + row, shift)
    tl.store(total_ptr + row, running_sum)


@triton.jit
def softmax_gradient_kernel(
    upstream_ptr,
    logits_ptr,
    target_ptr,
    largest_ptr,
    total_ptr,
    result_ptr,
    upstream_stride,
    num_inner,
    outer_stride,
    inner_stride,
    column_stride,
    result_outer_stride,
    result_inner_stride,
    result_column_stride,
    vocabulary,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    logit_scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gradient of one row's loss; `result` may be the logits: each lane writes what it alone has read."""
    row = tl.program_id(0).to(tl.int64)
    outer = row // num_inner
    inner = row - outer * num_inner
    logits_ptr += outer * outer_stride + inner * inner_stride
    result_ptr += outer * result_outer_stride + inner * result_inner_stride
    columns = tl.cast(vocabulary, tl.int64)
    lanes = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        for start in range(0, columns, BLOCK):
            zeros = tl.zeros([BLOCK], tl.float32)
            pointers = result_ptr + (start + lanes) * result_column_stride
            store_rounded(pointers, zeros, lanes < columns - start, INTERPRETED)
        return

    upstream = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
    shift = tl.load(largest_ptr + row).to(tl.float32)
    total = tl.load(total_ptr + row).to(tl.float32)
    coefficient = tl.where((target >= 0) & (target < columns), upstream, float("nan")) * logit_scale
    # d loss / d logit = p - (1 - smoothing) [target] - smoothing / V + 2 z lse p; the last must not drown in p - 1.
    inverse = 1.0 / total
    growth = 2.0 * z_loss * (shift + tl.log(total))
    share = label_smoothing / columns.to(tl.float32)
    for start in range(0, columns, BLOCK):
        inside = lanes < columns - start
        pointers = logits_ptr + (start + lanes) * column_stride
        logits = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * logit_scale
        if HAS_SOFTCAP:
            ratio = tanh(logits / softcap)
            logits = softcap * ratio
        p = tl.exp2((logits - shift) * 1.4426950408889634) * inverse
        gradient = tl.where(lanes == target - start, p - (1.0 - label_smoothing), p)
        if HAS_SMOOTHING:
            gradient -= share
        gradient += p * growth
        if HAS_SOFTCAP:
            gradient *= 1.0 - ratio * ratio
        results = result_ptr + (start + lanes) * result_column_stride
        store_rounded(results, gradient * coefficient, inside, INTERPRETED)


def launch_softmax_loss(logits: Tensor, target: Tensor, loss: Tensor, sums: RowSums, terms: LossTerms) -> None:
    """`reference_softmax_loss` in Triton."""
    num_outer, num_inner, vocabulary = logits.shape
    launch = row_loss_launch(vocabulary, warp_size(logits))
    with on_device(logits):
        softmax_loss_kernel[(num_outer * num_inner,)](
            logits,
            target,
            loss,
            *sums,
            num_inner,
            *logits.stride(),
            vocabulary,
            *terms,
            HAS_SOFTCAP=terms.softcap > 0.0,
            HAS_SMOOTHING=terms.label_smoothing > 0.0,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )


def launch_softmax_gradient(
    upstream: Tensor, logits: Tensor, target: Tensor, sums: RowSums, result: Tensor, terms: LossTerms
) -> None:
    """`reference_softmax_gradient` in Triton."""
    num_outer, num_inner, vocabulary = logits.shape
    launch = row_loss_launch(vocabulary, warp_size(logits))
    with on_device(logits):
        softmax_gradient_kernel[(num_outer * num_inner,)](
            upstream,
            logits,
            target,
            *sums,
            result,
            upstream.stride(0),
            num_inner,
            *logits.stride(),
            *result.stride(),
            vocabulary,
            *terms,
            HAS_SOFTCAP=terms.softcap > 0.0,
            HAS_SMOOTHING=terms.label_smoothing > 0.0,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
