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
from ._terms import LossTerms


@triton.jit
def _tanh(x) -> tl.tensor:
    """Is exact to fp32, also near zero."""
    # No libdevice: it has no interpreter. Near zero 1 - e cancels, there the series is exact to fp32.
    square = x * x
    series = -1382.0 / 155925.0
    series = series * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    magnitude = tl.abs(x)
    e = tl.exp2(magnitude * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(magnitude < 0.4, x + x * square * series, tl.where(x < 0, -far, far))


@triton.jit
def _scaled_logits(pointers, mask, inside, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr) -> tl.tensor:
    """Returns logits as the loss sees them, in fp32; minus infinity where not `inside`."""
    logits = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        logits = softcap * _tanh(logits / softcap)
    return tl.where(inside, logits, float("-inf"))


@triton.jit
def _row_sums(
    logits_ptr,
    column_stride,
    columns,
    readable,
    origin,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Reads a row once: its maximum (0 of nothing but -inf), the sum of exponentials above that, and with smoothing
    the sum of logits above `origin`. Columns up to `readable` may be read, those from `columns` on do not count."""
    lanes = tl.arange(0, BLOCK)
    running_max = tl.full((), float("-inf"), tl.float32)
    running_sum = tl.full((), 0.0, tl.float32)
    plain_sum = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        inside = lanes < columns - start
        pointers = logits_ptr + start * column_stride + lanes * column_stride
        logits = _scaled_logits(pointers, lanes < readable - start, inside, logit_scale, softcap, HAS_SOFTCAP)
        new_max = tl.maximum(running_max, tl.max(logits, 0))
        # A block of nothing but -inf (a masked vocabulary) must not become NaN by -inf - -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        terms = tl.exp2((logits - shift) * 1.4426950408889634)
        running_sum = running_sum * tl.exp2((running_max - shift) * 1.4426950408889634) + tl.sum(terms, 0)
        running_max = new_max
        if HAS_SMOOTHING:
            plain_sum += tl.sum(tl.where(inside, logits - origin, 0.0), 0)
    return tl.where(running_max == float("-inf"), 0.0, running_max), running_sum, plain_sum


@triton.jit
def row_loss_kernel(
    logits_ptr,
    target_ptr,
    coefficient_ptr,
    loss_ptr,
    row_stride,
    vocabulary,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes the loss of one row of `logits [rows, row_stride]`, and its gradient in place of the logits.

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
    picked = _scaled_logits(picked_ptr, is_target_valid, is_target_valid, logit_scale, softcap, HAS_SOFTCAP)
    # Sums of logits are taken from here: what all of them have in common must not drown the differences.
    origin = tl.where(picked == float("-inf"), 0.0, picked)
    shift, running_sum, plain_sum = _row_sums(
        logits_ptr, 1, columns, padded, origin, logit_scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, BLOCK
    )
    # Beside logits of 10,000 an lse in fp32 is exact to a thousandth only: loss and p are taken from its two parts.
    log_sum = tl.log(running_sum)
    loss = (1.0 - label_smoothing) * ((shift - picked) + log_sum)
    if HAS_SMOOTHING:
        loss += label_smoothing * ((shift - origin) + log_sum) - share * plain_sum
    tl.store(loss_ptr + row, loss * coefficient)

    if WRITES_GRADIENT:
        # d loss / d logit = p - (1 - smoothing) [target] - smoothing / V, subtracted in fp32.
        share_of_one = 1.0 / running_sum
        for start in range(0, columns, BLOCK):
            inside = lanes < columns - start
            writable = lanes < padded - start
            pointers = logits_ptr + start + lanes
            logits = _scaled_logits(pointers, writable, inside, logit_scale, softcap, HAS_SOFTCAP)
            gradient = tl.exp2((logits - shift) * 1.4426950408889634) * share_of_one
            if HAS_SMOOTHING:
                gradient -= share
            gradient = tl.where(lanes == target - start, gradient - (1.0 - label_smoothing), gradient)
            if HAS_SOFTCAP:
                ratio = logits / softcap
                gradient *= 1.0 - ratio * ratio
            gradient *= coefficient * logit_scale
            store_rounded(pointers, tl.where(inside, gradient, 0.0), writable, INTERPRETED)


def launch_row_loss(rows: Rows, terms: LossTerms, *, writes_gradient: bool) -> None:
    """Does in Triton what `reference_row_loss` does; the logits are a view into a slab with padded rows."""
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
