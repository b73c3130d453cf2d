"""Remembers the script's variables that lead to models, optimizers and their helpers where its loop begins.

Two models of one class, as a pair of critics, are the same to the garbage collector: a variable's name tells them apart
in each process. Names are those of one place, the loop: a function that is called from there has others.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from memwall.checkpoint.reachable import reachable


class Variables:
    """Knows objects by the variables that led to them when it looked."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def look(self) -> None:
        """Notes what the calling script can reach."""
        self._names.clear()
        for name, value in reachable():
            if isinstance(value, (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)):
                self._names[value] = name
        for module, name in list(self._names.items()):
            for path, inner in module.named_modules() if isinstance(module, nn.Module) else ():
                self._names.setdefault(inner, f"{name}.{path}")

    def name_of(self, value: Any) -> str:
        """Returns the variable that leads to an object; "" where none is known."""
        return self._names.get(value, "")

    def find(self, name: str) -> Any:
        """Returns the object that a variable leads to; None where there is none."""
        return next((value for value, known in self._names.items() if known == name), None)

    def find_models(self, names: Sequence[str]) -> list[nn.Module]:
        """Returns the models that variables lead to; [] unless each leads to another one."""
        found = [self.find(name) for name in names]
        models = [value for value in found if isinstance(value, nn.Module)]
        return models if len({*map(id, models)}) == len(names) else []
