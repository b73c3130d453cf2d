"""`rms_norm` over the last dimension, in one pass forward and one backward."""

from .norms import Casting, rms_norm

__all__ = ["Casting", "rms_norm"]
