"""Keeps what one call of a model begins with: the model's state, and what it is called with."""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.blocks.held_values import MAX_CLONED_BYTES, holds_the_same, refill
from memwall.session.model_state import ModelState
from memwall.torch_internals.autograd import version_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_REFILLED = (list, dict)


class CallState:
    """Keeps what a call may change, from each `take` on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._of_model = ModelState(model, MAX_CLONED_BYTES)
        self._tensors: list[tuple[Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._unknown = ""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes down what a call with these arguments finds."""
        self.let_go()
        for value in (*args, *kwargs.values()):
            self._look_at(value)
        self._of_model.take()

    def settle(self) -> None:
        """Notes what a first forward has changed."""
        self._of_model.settle()

    def let_go(self) -> None:
        """Lets go of the arguments."""
        self._tensors, self._containers, self._unknown = [], [], ""

    def why_not(self) -> str | None:
        """Returns why the call cannot be made again; None if it can."""
        if self._unknown:
            return f"the model is called with a {self._unknown}, which its forward may have changed"
        if any(version_of(tensor) != version for tensor, version in self._tensors):
            return "its forward writes into a tensor that it is called with"
        return self._of_model.why_not()

    def put_back(self) -> None:
        """Puts everything back, for another call with the same arguments."""
        for live, copied in self._containers:
            if not holds_the_same(live, copied):
                refill(live, copied)
        self._of_model.put_back()

    def _look_at(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._tensors.append((value, version_of(value)))
        elif isinstance(value, UserDict):
            self._look_at(value.data)
        elif isinstance(value, (Mapping, list, tuple)):
            if type(value) in _REFILLED:
                self._containers.append((value, value.copy()))  # type: ignore[union-attr]
            elif not isinstance(value, tuple):
                self._unknown = self._unknown or type(value).__name__
            for item in value.values() if isinstance(value, Mapping) else value:
                self._look_at(item)
        elif not isinstance(value, _PLAIN):
            self._unknown = self._unknown or type(value).__name__
