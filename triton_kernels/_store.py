"""The one place where a kernel rounds fp32 to another dtype, or to integers."""

import triton
import triton.language as tl

# Added to an fp32 number below 2^22 it rounds to the nearest integer, which then stands in the low bits.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def nearest_integers(values) -> tl.tensor:
    """Returns the nearest integers, modulo 2^22: cheaper than a conversion."""
    return (values + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _bf16_bits(values) -> tl.tensor:
    """Returns the upper 16 bits of fp32 `values` rounded to nearest even; NaN, which that would make -0.0, apart."""
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
