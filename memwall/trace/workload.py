"""Holds what one training step needs, as factories: nothing is allocated until a step is recorded or run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwall.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Holds model, batch, loss and optimizer of one training step.

    Factories are called anew by each recording, under fake tensors where the trace needs no memory.

    >>> import torch
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     batch=lambda: torch.ones(2, 4),
    ...     loss=lambda model, batch: model(batch).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ... )
    >>> workload.make_batch().shape
    torch.Size([2, 4])

    Raises:
        UsageError: a field is not callable where it must be.
    """

    model: Callable[[], nn.Module] | nn.Module
    """A function returning the model, or the model itself."""
    batch: Any
    """A function returning one micro-batch, or the batch itself: tensors in any nesting of list, tuple and dict."""
    loss: Callable[[Any, Any], Tensor]
    """`loss(model, batch)`: runs forward and returns the scalar that backward starts from."""
    optimizer: Callable[[Iterable[Any]], Optimizer]
    """`optimizer(params)`: returns a new optimizer over these parameters."""

    def __post_init__(self) -> None:
        expected = {
            "model": "a torch.nn.Module or a function returning one",
            "loss": "a function loss(model, batch) returning a scalar tensor",
            "optimizer": "a function optimizer(params) returning a torch.optim.Optimizer",
        }
        for name, meaning in expected.items():
            value = getattr(self, name)
            if not callable(value):
                hint = ""
                if name == "optimizer":
                    hint = "; for an optimizer class write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4)"
                raise UsageError(f"Workload: {name} is {type(value).__name__}; expected {meaning}{hint}")

    def make_model(self) -> nn.Module:
        """Returns the model: made by the factory, or the one given.

        Raises:
            UsageError: the factory returned something else.
        """
        from torch import nn

        if isinstance(self.model, nn.Module):
            return self.model
        model = self.model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"Workload: model() returned {type(model).__name__}; expected a torch.nn.Module")
        return model

    def make_batch(self) -> Any:
        """Returns one micro-batch: made by the factory, or the one given."""
        return self.batch() if callable(self.batch) else self.batch

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Returns a new optimizer over the parameters of `model` that need a gradient.

        Raises:
            UsageError: the factory returned something else.
        """
        from torch.optim import Optimizer

        # A list: factories that make parameter groups go over it more than once.
        optimizer = self.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"Workload: optimizer(params) returned {type(optimizer).__name__}; expected a torch.optim.Optimizer"
            )
        return optimizer
