"""The one place where a kernel rounds fp32 to its output's dtype."""

import triton
import triton.language as tl

__all__ = ["store_rounded"]


@triton.jit
def store_rounded(pointers, values, mask, INTERPRETED: tl.constexpr) -> None:
    """Stores fp32 `values`, rounded to nearest even.

    Triton's interpreter truncates to bf16 instead, silently (triton issue #11584, turned down): there the bits are
    rounded by integer arithmetic, with NaN, which that would turn into -0.0, selected out.
    """
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)
        tl.store(pointers, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
