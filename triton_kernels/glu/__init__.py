"""`swiglu` and `geglu`: activation(gate) * up in one pass, without the activated gate that eager keeps for backward."""

from .activations import geglu, swiglu

__all__ = ["geglu", "swiglu"]
