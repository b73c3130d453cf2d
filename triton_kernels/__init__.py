"""Fused kernels: one operation per package, beside its plain torch reference. Imported as `memwall.triton_kernels`.

Importing this needs torch only. A kernel's own module is loaded by its first launch; where triton is not installed, and
on the CPU, the reference runs instead: the same mathematics, chunked alike.
"""

from . import _own_work as _own_work
from .glu import geglu, swiglu
from .linear_cross_entropy import linear_cross_entropy
from .norms import rms_norm

__all__ = ["geglu", "linear_cross_entropy", "rms_norm", "swiglu"]
