"""Hears of the backwards of a script that has called no module: of tensors alone, which no hook of a model sees."""

import os
from collections.abc import Callable
from typing import Any

import torch

from memwall.patches import Patches

_FUNCTIONS = ("backward", "grad")
"""Names the functions of torch.autograd by which every backward begins."""


class BareSteps:
    """Looks from `listen` until `end`, in the process that it was made in.

    Args:
        begins: called before each backward.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins, self._pid = begins, os.getpid()
        self.num_seen = 0
        self._patches = Patches("sees gradients that are computed without a model")

    def listen(self) -> None:
        """Looks at every backward from now on."""
        for name in _FUNCTIONS:
            self._patches.wrap(torch.autograd, name, self._run)

    def end(self) -> None:
        """Ends that. Safe to call twice."""
        self._patches.undo()

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and os.getpid() == self._pid:
            self.num_seen += 1
            self._begins()
        return original(*args, **kwargs)
