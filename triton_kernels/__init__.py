"""Fused kernels: one operation per file, beside its plain torch reference. Imported as `memwall.triton_kernels`.

Importing this needs torch only. A kernel's own module is loaded by its first launch; where triton is not installed, and
on the CPU, the reference runs instead: the same mathematics, chunked alike.
"""

from .cost import KernelCost
from .linear_cross_entropy import linear_cross_entropy

__all__ = ["KernelCost", "linear_cross_entropy"]
