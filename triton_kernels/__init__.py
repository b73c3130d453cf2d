"""Fused kernels: one operation per file, beside its plain torch reference. Imported as `memwall.triton_kernels`.

Importing this needs torch only. A kernel's own module is loaded by its first launch; where triton is not installed, and
on the CPU, the reference runs instead: the same mathematics, chunked alike.
"""

from .cost import KernelCost
from .glu import geglu, swiglu
from .linear_cross_entropy import linear_cross_entropy
from .norms import add_rms_norm, layer_norm, rms_norm
from .recompute import recompute_handles

__all__ = [
    "KernelCost",
    "add_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "recompute_handles",
    "rms_norm",
    "swiglu",
]
