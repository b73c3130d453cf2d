"""Computes what a row of a table holds before it is trained: a function of (seed, id) alone.

Which rank makes it, when, and in which batch change no bit: only integer arithmetic, a table look-up and one product
are involved, for which vector kernels and their scalar ends agree. (`log` and `cos` would differ in the last bit.)
"""

from functools import lru_cache
from typing import Literal

import msgspec
import torch
from torch import Tensor

from memwall.rows.loops import NUM_LEVELS, draw_rows

_GRID = 1 << 20


class InitialRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how rows begin."""

    kind: Literal["normal", "uniform"]
    """Normal with standard deviation `scale`, cut at 4.3 of them; or uniform between -scale and scale."""
    scale: float
    seed: int
    zero_id: int | None = None
    """This row begins with zeros (`padding_idx`)."""

    def rows(self, ids: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Returns the rows of these ids before training, [n, num_columns].

        Args:
            ids: int64 [n].
            num_columns: elements in a row.
            dtype: of the result; drawn in float32.
        """
        drawn = draw_rows(ids, self.seed, num_columns, _levels(self.kind))
        drawn *= self.scale
        if self.zero_id is not None:
            drawn[ids == self.zero_id] = 0.0
        return drawn.to(dtype)


@lru_cache(maxsize=2)
def _levels(kind: Literal["normal", "uniform"]) -> Tensor:
    """Returns 65 536 equally likely values; normal ones lie on a grid, so that no machine's `erf` shows."""
    if kind == "uniform":
        return (torch.arange(NUM_LEVELS, dtype=torch.float32, device="cpu") - (NUM_LEVELS - 1) / 2) / (NUM_LEVELS / 2)
    middles = (torch.arange(NUM_LEVELS, dtype=torch.float64, device="cpu") + 0.5) / NUM_LEVELS
    levels: Tensor = (torch.special.ndtri(middles) * _GRID).round().div(_GRID).float()
    return levels
