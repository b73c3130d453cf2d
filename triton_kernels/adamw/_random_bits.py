"""Random bits in kernels: the ones that _philox.py gives on the CPU."""

import triton
import triton.language as tl

__all__ = ["random_bits"]


@triton.jit
def random_bits(seed, groups, third, fourth) -> tl.tensor:
    """16 bits for each of the eight elements of a group [..., 1]: one call of Philox serves them all."""
    low = groups.to(tl.uint32)
    zeros = low * 0
    a, b, c, d = tl.philox(
        seed, low, (groups >> 32).to(tl.uint32), zeros + third.to(tl.uint32), zeros + fourth.to(tl.uint32)
    )
    element = tl.arange(0, 8)
    word = tl.where(element < 2, a, tl.where(element < 4, b, tl.where(element < 6, c, d)))
    return ((word >> ((element % 2) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)
