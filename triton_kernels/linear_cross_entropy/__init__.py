"""`linear_cross_entropy`: the loss of a language model from hidden states and head, without ever holding its logits."""

from .loss import DEFAULT_CHUNK_ROWS, LossOptions, LossShape, chunk_rows_for, cost, linear_cross_entropy

__all__ = ["DEFAULT_CHUNK_ROWS", "LossOptions", "LossShape", "chunk_rows_for", "cost", "linear_cross_entropy"]
