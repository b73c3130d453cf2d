"""The optimizers that step one model: one, several (as Muon for matrices and AdamW for the rest), or none known yet."""

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["JOINT", "Optimizers", "joint_name", "optimizers_of", "trains"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
"""What a caller may give; `optimizers_of` makes a tuple of it."""

JOINT = " + "
"""Between the names of several."""


def optimizers_of(given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Each of them once, in the order given."""
    if given is None:
        return ()
    return (given,) if isinstance(given, torch.optim.Optimizer) else tuple(dict.fromkeys(given))


def joint_name(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Their classes, as "Muon + AdamW"; "" of none."""
    return JOINT.join(type(optimizer).__name__ for optimizer in optimizers)


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether it steps a parameter of this model."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in trained for parameter in model.parameters())
