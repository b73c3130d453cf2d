"""What tells one norm from another, and what its operators are called with."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Casting", "NormTerms"]

Casting = Literal["llama", "gemma", "plain"]


class NormTerms(NamedTuple):
    """weight * (x - mean) / sqrt(var + eps) + bias, where RMSNorm has neither mean nor bias."""

    eps: float
    casting: str
    """llama: normalised values are rounded to the dtype of x, then multiplied by weight; gemma: by 1 + weight, in fp32,
    rounded once; plain: by weight, in fp32, rounded once, as torch's own modules do."""
    is_centered: bool
    """LayerNorm."""

    @property
    def rounds(self) -> bool:
        """Whether there is a rounding before the weight."""
        return self.casting == "llama"

    @property
    def weight_offset(self) -> float:
        """What is added to the weight."""
        return 1.0 if self.casting == "gemma" else 0.0

    def result_dtype(self, dtype: torch.dtype, weight: Tensor | None) -> torch.dtype:
        """Of the result, where nobody asks for another, as eager code has it; `dtype` is that of what is normalised."""
        return dtype if weight is None or not self.rounds else torch.promote_types(dtype, weight.dtype)
