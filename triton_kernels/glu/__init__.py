"""`swiglu` and `geglu`: activation(gate) * up in one pass, without the activated gate that eager keeps for backward."""

from .activations import GluShape, cost, geglu, swiglu

__all__ = ["GluShape", "cost", "geglu", "swiglu"]
