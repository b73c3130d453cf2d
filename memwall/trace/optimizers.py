"""The optimizers that step one model, and the one table of what memwall knows of each class of optimizers.

A technique that depends on how an optimizer steps asks here, so that a class is looked at once, in one place.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from msgspec import Struct
from torch import nn


class _Class(Struct, frozen=True, kw_only=True):
    """Says how the optimizers of one class step. Whoever adds one has read its step."""

    homes: tuple[str, ...] = ("torch.optim",)
    """The modules that the class is in: others of that name bring their own steps."""
    is_stepped_alone: bool = True
    """Says that each parameter is updated from its own gradient, state and group alone."""
    is_elementwise: bool = True
    """Says that each element is, too: neither the shape of its parameter nor a norm counts."""
    has_moments: bool = False
    """Says that its state is two moments, which can be kept in fewer digits or stepped by a fused kernel on the CPU."""
    is_fused_on_cuda: bool = False
    """Says that every supported release of torch has its fused kernel for CUDA (native_functions.yaml)."""
    leaves_foreach_to_torch: bool = True
    """Says that torch picks foreach kernels on CUDA where nobody has chosen (`_default_to_fused_or_foreach`)."""


# LBFGS and LAMB are left out: they mix parameters, or take norms over them.
_CLASSES = {
    "ASGD": _Class(),
    "Adadelta": _Class(),
    "Adafactor": _Class(is_elementwise=False, leaves_foreach_to_torch=False),
    "Adagrad": _Class(),  # its fused kernel is new
    "Adam": _Class(has_moments=True, is_fused_on_cuda=True),
    "AdamW": _Class(has_moments=True, is_fused_on_cuda=True),
    "Adamax": _Class(),
    # Read in lion-pytorch 0.2.5: what parameters share are a group's settings and the learning rate it was made with.
    "Lion": _Class(homes=("lion_pytorch.lion_pytorch", "lion_pytorch.foreach")),
    "Muon": _Class(is_elementwise=False),
    "NAdam": _Class(),
    "RAdam": _Class(),
    "RMSprop": _Class(),
    "Rprop": _Class(),
    "SGD": _Class(is_fused_on_cuda=True),
    "SparseAdam": _Class(is_elementwise=False, leaves_foreach_to_torch=False),
    # DeepSpeed's own, which DeepSpeed alone steps.
    **dict.fromkeys(
        ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"), _Class(homes=(), is_stepped_alone=False)
    ),
}

STEPPED_ALONE = frozenset(name for name, known in _CLASSES.items() if known.is_stepped_alone)
"""Holds the names of those that can be stepped a few parameters at a time with the same result."""
ELEMENTWISE = frozenset(name for name, known in _CLASSES.items() if known.is_elementwise)
"""Holds the names of those that can be stepped on flat pieces of parameters, as DeepSpeed does."""
FUSED_ON_CUDA = frozenset(name for name, known in _CLASSES.items() if known.is_fused_on_cuda)
"""Holds the names of those that take `fused=True` on a CUDA device."""
WITH_MOMENTS = tuple(name for name, known in _CLASSES.items() if known.has_moments)
"""Holds the names of those whose state is two moments."""

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
"""Names what a caller may give: one, several (as Muon for matrices and AdamW for the rest), or none known yet."""

JOINT = " + "
"""Stands between the names of several."""


def known_class(kind: Any) -> type | None:
    """Returns the class of the table that a class is or derives from; None for any other, even if named alike."""
    return next((base for base in kind.__mro__ if base.__name__ in _CLASSES and _is_at_home(base)), None)


def _is_at_home(kind: type) -> bool:
    homes = map(sys.modules.get, _CLASSES[kind.__name__].homes)
    return any(getattr(home, kind.__name__, None) is kind for home in homes)


def has_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's state is the two moments of torch's Adam or AdamW."""
    return isinstance(optimizer, tuple(getattr(torch.optim, name) for name in WITH_MOMENTS))


def leaves_foreach_to_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether torch picks foreach kernels for the optimizer on CUDA if its groups do not say."""
    known = known_class(type(optimizer))
    return known is None or _CLASSES[known.__name__].leaves_foreach_to_torch


def optimizers_of(given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Returns each of the optimizers given once, in their order."""
    if given is None:
        return ()
    is_one = isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable)
    return (given,) if is_one else tuple(dict.fromkeys(given))  # type: ignore[return-value, arg-type]


def joint_name(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Returns the names of their classes, as "Muon + AdamW"; "" of none."""
    return JOINT.join(type(optimizer).__name__ for optimizer in optimizers)


def counted(joint: str) -> str:
    """Returns such names for a person, who may have an optimizer for each parameter.

    >>> counted("Adam + Muon + Adam")
    '2 x Adam + Muon'
    """
    counts = Counter(joint.split(JOINT))
    return JOINT.join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Returns whether the optimizer steps a parameter of this model."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in trained for parameter in model.parameters())


def replaces(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Tells whether an optimizer trains all that another one does: a loop makes a new one to go on, as to fine-tune."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return all(id(parameter) in trained for group in other.param_groups for parameter in group["params"])


def steps_alike(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Tells whether an optimizer trains just what another one does, and its steps need as much: lr is no matter."""
    is_same = type(optimizer) is type(other) and replaces(optimizer, other) and replaces(other, optimizer)
    return is_same and _options(optimizer) == _options(other)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    plain = (bool, int, float, str)
    groups = optimizer.param_groups
    return [{k: v for k, v in one.items() if isinstance(v, plain) and k not in ("lr", "initial_lr")} for one in groups]
