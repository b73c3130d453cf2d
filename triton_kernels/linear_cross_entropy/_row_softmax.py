"""What the kernels of both losses read of a row of logits: scaled and capped, their maximum and sums. Needs triton."""

import triton
import triton.language as tl

__all__ = ["row_sums", "scaled_logits", "tanh"]


@triton.jit
def tanh(x) -> tl.tensor:
    """Exact to fp32, also near zero."""
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
def scaled_logits(pointers, mask, inside, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr) -> tl.tensor:
    """Logits as the loss sees them, in fp32; minus infinity where not `inside`."""
    logits = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        logits = softcap * tanh(logits / softcap)
    return tl.where(inside, logits, float("-inf"))


@triton.jit
def row_sums(
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
    """Of a row read once: its maximum (0 of nothing but -inf), the sum of exponentials above that, and with smoothing
    the sum of logits above `origin`. Columns up to `readable` may be read, those from `columns` on do not count."""
    lanes = tl.arange(0, BLOCK)
    running_max = tl.full((), float("-inf"), tl.float32)
    running_sum = tl.full((), 0.0, tl.float32)
    plain_sum = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        inside = lanes < columns - start
        pointers = logits_ptr + start * column_stride + lanes * column_stride
        logits = scaled_logits(pointers, lanes < readable - start, inside, logit_scale, softcap, HAS_SOFTCAP)
        new_max = tl.maximum(running_max, tl.max(logits, 0))
        # A block of nothing but -inf (a masked vocabulary) must not become NaN by -inf - -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        terms = tl.exp2((logits - shift) * 1.4426950408889634)
        running_sum = running_sum * tl.exp2((running_max - shift) * 1.4426950408889634) + tl.sum(terms, 0)
        running_max = new_max
        if HAS_SMOOTHING:
            plain_sum += tl.sum(tl.where(inside, logits - origin, 0.0), 0)
    return tl.where(running_max == float("-inf"), 0.0, running_max), running_sum, plain_sum
