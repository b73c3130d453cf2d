"""The Triton half of `linear_cross_entropy`: the loss of each row of logits, the gradient written over the logits.

One program per row reads it twice: for the maximum and the sum of exponentials, then for the gradient, which for all
but huge chunks finds the row in the L2 cache. Everything is fp32 inside and rounded once. Needs triton.
"""

import triton
import triton.language as tl

from .._configs import row_loss_launch
from .._launch import is_interpreting, on_device, warp_size
from .._store import store_rounded
from ._reference import Rows
from ._row_softmax import row_sums, scaled_logits
from ._terms import LossTerms

__all__ = ["launch_row_loss", "row_loss_kernel"]


@triton.jit
def row_loss_kernel(
    logits_ptr,
    target_ptr,
    coefficient_ptr,
    loss_ptr,
    lse_ptr,
    row_stride,
    vocabulary,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    logit_scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Loss of one row of `logits [rows, row_stride]`, and its gradient in place of the logits.

    Columns from `vocabulary` to `row_stride` are padding: read with the rest, so that every load is aligned, and
    never counted.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.cast(vocabulary, tl.int64)
    padded = tl.cast(row_stride, tl.int64)
    lanes = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if WRITES_GRADIENT:
            for start in range(0, columns, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32)
                store_rounded(logits_ptr + start + lanes, zeros, lanes < padded - start, INTERPRETED)
        return

    coefficient = tl.load(coefficient_ptr + row).to(tl.float32)
    is_target_valid = (target >= 0) & (target < columns)
    # Out of range: this row is NaN, as torch has it on CUDA, and nothing is read out of bounds.
    coefficient = tl.where(is_target_valid, coefficient, float("nan"))
    # What smoothing puts on each column.
    share = label_smoothing / columns.to(tl.float32)

    picked_ptr = logits_ptr + tl.where(is_target_valid, target, 0)
    picked = scaled_logits(picked_ptr, is_target_valid, is_target_valid, logit_scale, softcap, HAS_SOFTCAP)
    # Sums of logits are taken from here: what all of them have in common must not drown the differences.
    origin = tl.where(picked == float("-inf"), 0.0, picked)
    shift, running_sum, plain_sum = row_sums(
        logits_ptr, 1, columns, padded, origin, logit_scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, BLOCK
    )
    # Beside logits of 10,000 an lse in fp32 is exact to a thousandth only: loss and p are taken from its two parts.
    log_sum = tl.log(running_sum)
    lse = shift + log_sum
    loss = (1.0 - label_smoothing) * ((shift - picked) + log_sum) + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss += label_smoothing * ((shift - origin) + log_sum) - share * plain_sum
    tl.store(loss_ptr + row, loss * coefficient)
    tl.store(lse_ptr + row, lse)

    if WRITES_GRADIENT:
        # d loss / d logit = p (1 + 2 z lse) - (1 - smoothing) [target] - smoothing / V, subtracted in fp32.
        growth = (1.0 + 2.0 * z_loss * lse) / running_sum
        for start in range(0, columns, BLOCK):
            inside = lanes < columns - start
            writable = lanes < padded - start
            pointers = logits_ptr + start + lanes
            logits = scaled_logits(pointers, writable, inside, logit_scale, softcap, HAS_SOFTCAP)
            gradient = tl.exp2((logits - shift) * 1.4426950408889634) * growth
            if HAS_SMOOTHING:
                gradient -= share
            gradient = tl.where(lanes == target - start, gradient - (1.0 - label_smoothing), gradient)
            if HAS_SOFTCAP:
                ratio = logits / softcap
                gradient *= 1.0 - ratio * ratio
            gradient *= coefficient * logit_scale
            store_rounded(pointers, tl.where(inside, gradient, 0.0), writable, INTERPRETED)


def launch_row_loss(rows: Rows, terms: LossTerms, *, writes_gradient: bool) -> None:
    """`reference_row_loss` in Triton; the logits a view into a slab with padded rows."""
    logits = rows.logits
    num_rows, vocabulary = logits.shape
    if num_rows == 0:
        return
    launch = row_loss_launch(vocabulary, warp_size(logits))
    with on_device(logits):
        row_loss_kernel[(num_rows,)](
            *rows,
            logits.stride(0),
            vocabulary,
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            terms.softcap,
            terms.logit_scale,
            HAS_SOFTCAP=terms.softcap > 0.0,
            HAS_SMOOTHING=terms.label_smoothing > 0.0,
            WRITES_GRADIENT=writes_gradient,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
