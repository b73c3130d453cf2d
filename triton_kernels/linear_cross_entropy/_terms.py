"""The terms of a row's loss."""

from typing import NamedTuple


class LossTerms(NamedTuple):
    """Tells what a row's loss is made of; its logits are z = softcap tanh(logit_scale logits / softcap)."""

    ignore_index: int
    label_smoothing: float
    """The share of the target that is spread over the whole vocabulary."""
    softcap: float
    """0 is none."""
    logit_scale: float
