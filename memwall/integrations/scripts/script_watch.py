"""Waits for the models and the optimizers of an unmodified script to show themselves."""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from memwall.checkpoint.reachable import reachable
from memwall.errors import MemwallError
from memwall.integrations.scripts.forward_calls import ForwardCalls
from memwall.integrations.scripts.threads import TrainingThread
from memwall.integrations.scripts.trained_models import as_one, optimizers_alive, trained_with
from memwall.patches import Patches
from memwall.session.loop.longer_batch import Shape, input_shape
from memwall.torch_internals.autograd import current_node
from memwall.trace.attached import attach_hook
from memwall.trace.optimizers import trains
from memwall.trace.together import models_of

_OF_GLOBAL_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"
"""Beginning of torch's warning at calls of compiled models. The hooks here do nothing a second time."""


class ScriptWatch:
    """Waits for the models and the optimizers of a script to show themselves, and remembers what memwall refused.

    Args:
        begins: called with what is trained, what of it is called right now, and whether there is an optimizer: when the
            first model is called, and again when it turns out that more is trained.
    """

    def __init__(self, script: str, begins: Callable[[nn.Module, nn.Module, bool], None]) -> None:
        self.script, self._begins, self._pid = script, begins, os.getpid()
        self.model: nn.Module | None = None
        self._early: list[torch.optim.Optimizer] = []
        self._foreign = weakref.WeakSet(optimizers_alive())
        """Holds optimizers that were there before the script began, where it is not alone in the process, and those of
        models that are gone."""
        self.failure: MemwallError | None = None
        self._called: dict[int, nn.Module] = {}
        """Models that the script calls."""
        self._known: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Id of the model that each module is in; 0 where it is not trained."""
        self._gone, self._returned = weakref.WeakSet[nn.Module](), weakref.WeakSet[nn.Module]()
        """Models that were taken for gone, and those of them that were called again."""
        self._of_copies = weakref.WeakSet[torch.optim.Optimizer]()
        """Optimizers that train what a model is called with in place of its parameters."""
        self._waiting = weakref.WeakSet[torch.optim.Optimizer]()
        """Optimizers that were found before any model was called whose parameters are trained."""
        self._carried_back = weakref.WeakSet[nn.Module]()
        """Models that count as trained as they look like copies in lower precision, which a teacher does as well."""
        self._evaluated: weakref.WeakKeyDictionary[nn.Module, Shape] = weakref.WeakKeyDictionary()
        """The largest batches that modules were called with before anything was trained."""
        self.evaluates_before: Callable[[], None] = lambda: None
        """Is told when a module is evaluated so on a CPU for the first time."""
        self._running = 0
        """The model that is being called."""
        self._forwards, self._thread = ForwardCalls(), TrainingThread(script)
        self.trains: Callable[[], bool] = torch.is_grad_enabled
        """Tells whether a call that is made now is one of training."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Goes around each hook: a script that catches memwall's error meets it again, and it decides the status."""
        if self.failure is not None:
            raise self.failure.without_frames()
        try:
            yield
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def before_forward(self, module: nn.Module, args: Any = ()) -> None:
        """Looks at a call: of a model that is known, of a part of one, or of something new."""
        self._forwards.called(module)
        if torch.compiler.is_compiling():
            return  # within compiled code, whose module was looked at
        if self._is_inherited:
            return
        if self._thread.is_another:
            self._called_elsewhere(module)
            return
        number = id(module)
        if self._running or number in self._called:
            self._running = self._running or number
            if self._thread.is_gone and self.trains():
                with self.guarded():
                    self._thread.check(module)
            return
        model = self._known.get(module)
        if model == number and self.trains():
            self._called[number], self._running = module, number
            return
        if model is not None and (not model or model == number or model in self._called):
            return  # not trained; or a part of a model that is called as a whole as well, as its embedding
        if not self._is_trainable(module):
            if self.model is None and not self.trains():
                self._note_evaluated(module, input_shape(args, {}))
            return
        if any(map(is_lazy, module.parameters())):
            self._running = number  # it is called to make its parameters; what it calls is no model of its own
            return
        with self.guarded():
            self._found(module)

    def listen(self, patches: Patches) -> None:
        """Looks at every call of a module from now on."""
        self._forwards.listen(patches)

        def made(original: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._waiting.clear()

        patches.wrap(torch.optim.Optimizer, "__init__", made)
        patches.hook(register_module_forward_pre_hook, self.before_forward)
        patches.hook(register_module_forward_hook, self.after_forward, always_call=True)

        def compiled_in_place(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)  # from now on the compiler sees torch's own hooks of it, and nobody else
            patches.push(attach_hook(module.register_forward_pre_hook, self.before_forward))
            patches.push(attach_hook(module.register_forward_hook, self.after_forward, always_call=True))

        patches.wrap(nn.Module, "compile", compiled_in_place)
        _ignore_warning(patches, _OF_GLOBAL_HOOKS)

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        """Notes that a model has been called."""
        if torch.compiler.is_compiling():
            return
        if self._running == id(module) and not self._thread.is_another:
            self._running = 0

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether an optimizer that is about to step trains a model that was called."""
        if self._is_inherited:
            return False
        if self.model is None and optimizer not in self._early:
            self._early.append(optimizer)  # its closure is going to call the model
        return self.model is not None and (optimizer in self._of_copies or trains(optimizer, self.model))

    def evaluated(self, model: nn.Module) -> Shape:
        """Returns the shape of the largest batch that a model was called with before anything was trained."""
        return max((self._evaluated.get(one, ()) for one in models_of(model)), key=math.prod)

    def _note_evaluated(self, module: nn.Module, shape: Shape) -> None:
        if module not in self._evaluated and any(one.device.type == "cpu" for one in module.parameters()):
            self.evaluates_before()
        self._evaluated[module] = max(self._evaluated.get(module, ()), shape, key=math.prod)

    @property
    def trains_copies(self) -> bool:
        """Tells whether the model that was called is not what the script trains, but what it is called with."""
        return bool(self._of_copies)

    def early_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Returns the optimizers of a model whose step has begun before the model was called for the first time."""
        early, self._early = self._early, []
        return [optimizer for optimizer in early if trains(optimizer, model)]

    @property
    def has_all_frozen(self) -> bool:
        """Tells whether the script has optimizers, and has frozen all that they train.

        A backward is then that of an input, as where samples are drawn from an energy, and no step of theirs.
        """
        if not self._waiting:
            self._waiting = weakref.WeakSet(one for one in optimizers_alive() if one not in self._foreign)
        groups = [group for optimizer in self._waiting for group in optimizer.param_groups]
        return bool(groups) and not any(one.requires_grad for group in groups for one in group["params"])

    @property
    def has_missed_steps(self) -> bool:
        """Tells whether optimizers have stepped of which no model was seen called."""
        return bool(self._early)

    @property
    def _is_inherited(self) -> bool:
        """Tells whether this is a process that the script has forked, with the hooks of its own."""
        return os.getpid() != self._pid

    def _is_trainable(self, module: nn.Module) -> bool:
        return (
            self.trains()
            and current_node() is None
            and any(parameter.requires_grad for parameter in module.parameters())
        )

    def _called_elsewhere(self, module: nn.Module) -> None:
        """Looks at a call that another thread makes than the one that trains."""
        if module not in self._known and self._is_trainable(module):
            found = trained_with(module, self._called.values(), foreign=self._foreign)
            if not found.is_trained:
                self._known.update((each, 0) for each in module.modules())
        if self._known.get(module, 1) and self._is_trainable(module):
            with self.guarded():
                self._thread.check(module)

    def _found(self, module: nn.Module) -> None:
        self._let_go(module)
        self._let_go_teachers(module)
        found = trained_with(module, self._called.values(), foreign=self._foreign)
        if not found.is_trained:
            self._known.update((each, 0) for each in module.modules())
            return
        self._thread.check(module)
        self._of_copies.update(found.of_copies)
        if found.is_carried_back:
            self._carried_back.add(module)
        alive = {id(model) for model in found.models}
        self._called = {number: model for number, model in self._called.items() if number in alive}
        self._called[id(module)] = module
        self._known.update((each, id(model)) for model in found.models for each in model.modules())
        self.model = as_one(found.models)
        self._running = id(module)
        self._begins(self.model, module, found.has_optimizer)

    def _let_go_teachers(self, called: nn.Module) -> None:
        """Lets go of models that look like copies of the one that is called: no gradient has come to them until now."""
        if not any(trains(optimizer, called) for optimizer in optimizers_alive()):
            return
        for number, model in list(self._called.items()):
            if model in self._carried_back and all(parameter.grad is None for parameter in model.parameters()):
                del self._called[number]
                self._known.update((each, 0) for each in model.modules())

    def _let_go(self, called: nn.Module) -> None:
        """Lets go of models that no variable of the script leads to: of an earlier fold of a cross-validation, say.

        What holds one may be hidden, in a library's object. One that is called again is found again, and kept.
        """
        if called in self._gone:
            self._returned.add(called)
            self._foreign.difference_update([one for one in self._foreign if trains(one, called)])
        if not self._called or not any(trains(optimizer, called) for optimizer in optimizers_alive()):
            return  # what nothing trains, as a network that measures a loss, takes no model's place
        held: set[int] = set()
        for _, value in reachable():
            if isinstance(value, nn.Module):
                held.update(map(id, value.parameters()))
            elif isinstance(value, torch.optim.Optimizer):
                held.update(id(parameter) for group in value.param_groups for parameter in group["params"])
        for number, model in list(self._called.items()):
            if model not in self._returned and held.isdisjoint(map(id, model.parameters())):
                self._gone.add(self._called.pop(number))
                for module in model.modules():
                    self._known.pop(module, None)
                self._foreign.update(one for one in optimizers_alive() if trains(one, model))


def _ignore_warning(patches: Patches, begin: str) -> None:
    warnings.filterwarnings("ignore", message=begin)
    entry = warnings.filters[0]

    def undo() -> None:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]

    patches.add("warning filter", begin, undo)
