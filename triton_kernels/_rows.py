"""Tensors of any number of dimensions as rows, the slices in which the CPU works on them, and their dtypes."""

from collections.abc import Iterator

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The operations take these."""

# Elements of the fp32 temporaries: 4 MiB each.
_SLICE_ELEMENTS = 1 << 20


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what is computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(tensor: Tensor) -> Tensor:
    """Returns [..., columns] as [rows, columns]: a copy only where the leading dimensions have no common stride."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def row_slices(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yields the rows that are worked on at a time, so that temporaries do not grow with the tensors."""
    step = max(1, _SLICE_ELEMENTS // max(1, num_columns))
    for begin in range(0, num_rows, step):
        yield slice(begin, begin + step)
