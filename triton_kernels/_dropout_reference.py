"""The plain torch half of `dropout`, which also is the CPU path: the kernel's bits. fp64 is computed in fp64."""

from torch import Tensor

from ._philox import random_bits
from ._rows import compute_dtype, row_slices

__all__ = ["reference_dropout"]


def reference_dropout(
    x: Tensor, residual: Tensor | None, result: Tensor, seed: Tensor, threshold: int, scale: float, site: int
) -> None:
    """Fills `result`.

    Args:
        x: [rows, columns], any strides.
        residual: alike, or None.
        result: alike.
        seed: int64, one element.
        threshold: of 2^16, the share that is dropped.
        scale: of what is not.
        site: tells masks of one seed apart.
    """
    wide, num_columns = compute_dtype(result.dtype), x.shape[1]
    for part in row_slices(*x.shape):
        values = x[part].to(wide)
        bits = random_bits(seed.reshape(()), part.start * num_columns, values.numel(), site, 0, x.device)
        # A factor, not a choice: what is not a number stays none, also where it is dropped.
        values = values * ((bits >= threshold) * scale).to(wide).view(values.shape)
        result[part] = values if residual is None else values + residual[part].to(wide)
