"""`FusedAdamW`: AdamW over many tensors in a few launches, moments in fp32 or 8 bits, clipping in the same pass."""

from .optimizer import AdamWShape, FusedAdamW, cost

__all__ = ["AdamWShape", "FusedAdamW", "cost"]
