"""The one place where a kernel rounds fp32 to another dtype."""

import triton
import triton.language as tl

__all__ = ["rounded", "store_rounded", "store_stochastic"]


@triton.jit
def _bf16_bits(values) -> tl.tensor:
    """The upper 16 bits of fp32 `values` rounded to nearest even; NaN, which that would turn into -0.0, apart."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, nearest, 0x7FC0)


@triton.jit
def store_rounded(pointers, values, mask, INTERPRETED: tl.constexpr) -> None:
    """Stores fp32 `values`, rounded to nearest even.

    Triton's interpreter truncates to bf16 instead, silently (triton issue #11584, turned down): there the bits are
    rounded by integer arithmetic.
    """
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, _bf16_bits(values).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def rounded(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """fp32 `values` as a tensor of `dtype` would hold them, still in fp32."""
    if INTERPRETED and dtype == tl.bfloat16:
        held = (_bf16_bits(values) << 16).to(tl.float32, bitcast=True)
    else:
        held = values.to(dtype).to(tl.float32)
    return held


@triton.jit
def store_stochastic(pointers, values, bits, mask) -> None:
    """Stores fp32 `values` as bf16, rounded up with the probability of what is cut off; `bits`: 16 random ones each."""
    pattern = values.to(tl.int32, bitcast=True)
    # NaN and infinity as they are: what is added would carry into them.
    is_finite = (pattern & 0x7F800000) != 0x7F800000
    up = tl.where(is_finite, pattern + bits, tl.where(values == values, pattern, 0x7FC00000)) >> 16
    tl.store(pointers, up.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
