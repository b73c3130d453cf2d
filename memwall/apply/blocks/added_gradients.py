"""Sees that a forward adds to gradients itself, as one with its own loss does: a second run would add them again."""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from memwall.patches import Patches
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import without_dispatch, without_subclass_functions


class AddedGradients:
    """Looks at what one forward, which runs within this, does to gradients.

    A backward is seen whatever it adds to. What is added by hand is seen of the tensors given.

    Args:
        tensors: whose gradients are compared with those before; of them leaves count.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        self._patches = Patches("sees gradients that a forward adds itself")
        self._thread = threading.get_ident()
        self.are_there = False
        """Whether any were added."""

    def __enter__(self) -> Self:
        self._before = self._gradients()
        self._patches.wrap(torch.autograd, "backward", self._run_backward)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._patches.undo()
        self.are_there = self.are_there or self._gradients() != self._before

    def _run_backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.are_there = self.are_there or threading.get_ident() == self._thread
        original(*args, **kwargs)

    def _gradients(self) -> list[tuple[int, int] | None]:
        with without_dispatch(), without_subclass_functions():
            found = [leaf.grad for leaf in self._leaves]
            return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in found]
