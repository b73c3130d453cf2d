"""What a row of a table holds before it is trained: a function of (seed, id) alone.

Which rank makes it, when, and in which batch change no bit: only integer arithmetic, a table look-up and one product
are involved, for which vector kernels and their scalar ends agree. (`log` and `cos` would differ in the last bit.)
"""

from functools import lru_cache
from typing import Literal

import msgspec
import torch
from torch import Tensor

from memwall.store.rows_loops import mixed

__all__ = ["InitialRows"]

_LEVELS = 1 << 16
_GRID = 1 << 20


class InitialRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows begin."""

    kind: Literal["normal", "uniform"]
    """Normal with standard deviation `scale`, cut at 4.3 of them; or uniform between -scale and scale."""
    scale: float
    seed: int
    zero_id: int | None = None
    """A row that begins with zeros (`padding_idx`)."""

    def rows(self, ids: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """The rows of these ids before training, [n, num_columns].

        Args:
            ids: int64 [n].
            num_columns: elements in a row.
            dtype: of the result; drawn in float32.
        """
        num_words = -(-num_columns // 4)  # one hash makes four elements of 16 bits each
        start = mixed(torch.tensor(self.seed, dtype=torch.int64, device="cpu"))
        counters = ids[:, None] * num_words + torch.arange(num_words, device="cpu")
        words = mixed(start + counters)[:, :, None] >> torch.tensor([0, 16, 32, 48], device="cpu")
        levels = (words & (_LEVELS - 1)).reshape(ids.numel(), -1)[:, :num_columns]
        drawn = _normal_levels()[levels] if self.kind == "normal" else (levels - (_LEVELS - 1) / 2) / (_LEVELS / 2)
        drawn *= self.scale
        if self.zero_id is not None:
            drawn[ids == self.zero_id] = 0.0
        return drawn.to(dtype)


@lru_cache(maxsize=1)
def _normal_levels() -> Tensor:
    """65 536 equally likely values of a normal distribution; rounded to a grid, so that no machine's `erf` shows."""
    middles = (torch.arange(_LEVELS, dtype=torch.float64, device="cpu") + 0.5) / _LEVELS
    levels: Tensor = (torch.special.ndtri(middles) * _GRID).round().div(_GRID).float()
    return levels
