"""`rms_norm`, `add_rms_norm` and `layer_norm` over the last dimension, in one pass forward and one backward."""

from .norms import Casting, NormShape, add_rms_norm, cost, layer_norm, rms_norm

__all__ = ["Casting", "NormShape", "add_rms_norm", "cost", "layer_norm", "rms_norm"]
