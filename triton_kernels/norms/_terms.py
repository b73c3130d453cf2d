"""Names what tells one norm from another."""

from typing import Literal, NamedTuple

Casting = Literal["llama", "gemma", "plain"]


class NormTerms(NamedTuple):
    """Tells weight * x / sqrt(mean(x^2) + eps) from its kin."""

    eps: float
    casting: str
    """llama: normalised values are rounded to the dtype of x, then multiplied by weight; gemma: by 1 + weight, in fp32,
    rounded once; plain: by weight, in fp32, rounded once, as torch's own modules do."""

    @property
    def rounds(self) -> bool:
        """Tells whether there is a rounding before the weight."""
        return self.casting == "llama"

    @property
    def weight_offset(self) -> float:
        """Returns what is added to the weight."""
        return 1.0 if self.casting == "gemma" else 0.0
