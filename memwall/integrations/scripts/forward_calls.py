"""Finds models whose `forward` a script calls itself, which calls no hooks, and has them called as others are.

What an optimizer gets its parameters from is a model. From then on until it is called for the first time, its class has
a forward that tells which it is: a call of the model, which every loop but a few makes, or a call of its forward alone.
The first has the class as it was again; the second makes a call of this and of each further one of that model.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memwall.patches import Patch, Patches, undo_all
from memwall.trace.attached import call_where_forward_is_called, has_hooks

_COMPILING = ((torch, "compile"), (nn.Module, "compile"), (torch.jit, "script"), (torch.jit, "trace"))


class ForwardCalls:
    """Waits from `listen` on for models whose forward is called."""

    def __init__(self) -> None:
        self._asked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules that were asked for their parameters."""
        self._waiting: dict[int, weakref.ref[nn.Module]] = {}
        """Models that nobody has called yet, by id."""
        self._classes: dict[type, Patch] = {}
        self._pid = os.getpid()
        self._patches = Patches("finds models whose forward a script calls itself")
        self._while_waiting = Patches("leaves forwards alone that are compiled")

    def listen(self, patches: Patches) -> None:
        """Looks at optimizers that are made from now on."""
        patches.wrap(nn.Module, "named_parameters", self._asks)
        patches.wrap(torch.optim.Optimizer, "__init__", self._made_optimizer)
        patches.add("forwards", "of classes that are called by them", self._undo)

    def called(self, module: nn.Module) -> None:
        """Hears of every call of a module: one that is waited for is called as models are."""
        if self._waiting and id(module) in self._waiting:
            self._let_go(module)

    def _asks(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._asked.add(module)
        return original(module, *args, **kwargs)

    def _made_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if os.getpid() != self._pid:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        asked = list(self._asked)
        models = [one for one in asked if any(id(parameter) in held for parameter in one.parameters())]
        self._asked.clear()
        inner = {id(part) for one in models for part in one.modules() if part is not one}
        for model in models:
            if id(model) not in inner and "forward" not in vars(model):
                self._wait_for(model)

    def _wait_for(self, model: nn.Module) -> None:
        kind, number = type(model), id(model)
        self._waiting[number] = weakref.ref(model, lambda _: self._waiting.pop(number, None))
        if not self._classes:
            # What compiles a model reads its forward; scripting looks at who calls it, and is left alone otherwise.
            for owner, name in _COMPILING:
                self._while_waiting.wrap(owner, name, self._compiles)
        if kind not in self._classes:
            self._classes[kind] = self._patches.wrap(kind, "forward", self._forward)

    def _forward(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or id(model) not in self._waiting or os.getpid() != self._pid:
            return original(model, *args, **kwargs)
        self._let_go(model)
        if has_hooks(model) or not any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            return original(model, *args, **kwargs)
        self._patches.push(call_where_forward_is_called(model))
        return model(*args, **kwargs)

    def _let_go(self, model: nn.Module) -> None:
        self._waiting.pop(id(model), None)
        if not any(type(found()) is type(model) for found in self._waiting.values()):
            patch = self._classes.pop(type(model), None)
            if patch is not None:
                patch.undo()
            if not self._classes:
                self._while_waiting.undo()

    def _compiles(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for found in list(self._waiting.values()):
            model = found()
            if model is not None:
                self._let_go(model)
        return original(*args, **kwargs)

    def _undo(self) -> None:
        undo_all((self._while_waiting.undo, self._patches.undo))
