"""`rms_norm` and `layer_norm` over the last dimension, in one pass forward and one backward."""

from .norms import Casting, layer_norm, rms_norm

__all__ = ["Casting", "layer_norm", "rms_norm"]
