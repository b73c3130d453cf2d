"""`linear_cross_entropy`: the loss of a language model from hidden states and head, without ever holding its logits."""

from ._cost import chunk_rows_for
from .loss import DEFAULT_CHUNK_ROWS, linear_cross_entropy

__all__ = ["DEFAULT_CHUNK_ROWS", "chunk_rows_for", "linear_cross_entropy"]
