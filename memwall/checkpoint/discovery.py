"""Finds what else of a script belongs to a step's state: the optimizer, schedulers and scalers that no hook shows.

They are objects of this process, so the garbage collector knows them. It is asked at the first forward, and again at
some commits, for what a script makes later.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from memwall.apply.precision import GradientScaling
from memwall.checkpoint.variables import Variables
from memwall.torch_internals.optimizers import inner_schedulers
from memwall.torch_internals.sharding import standing_parameters
from memwall.trace.together import TrainedTogether

HELPERS = (LRScheduler, torch.amp.GradScaler, GradientScaling)
"""Classes of objects that have a state of their own beside the optimizer."""
_LOOK_RATIO = 8
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_FEW_TYPES = 4


def find_optimizers(model: nn.Module, objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers among them that train a model's parameters."""
    parameters = {id(parameter) for parameter in standing_parameters(model).values()}
    return [
        value
        for value in objects
        if isinstance(value, torch.optim.Optimizer)
        and not isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer)  # a wrapper, as accelerate's
        and any(id(parameter) in parameters for group in value.param_groups for parameter in group["params"])
    ]


def find_models(shapes: Mapping[str, tuple[int, ...]]) -> list[nn.Module]:
    """Returns modules in use whose parameters have exactly these names and shapes."""
    return [value for value in objects_of((nn.Module,), without_garbage=True) if shapes_of(value) == shapes]


def find_together(shapes: Mapping[str, tuple[int, ...]], trained: Sequence[str]) -> nn.Module | None:
    """Returns the modules in use that have these parameters together; None where no single optimizer tells which.

    Args:
        shapes: of all parameters, by the names that they have together.
        trained: names of those that the optimizer trains, in its order.
    """
    optimizers = objects_of((torch.optim.Optimizer,), without_garbage=True)
    held = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    matching = [parameters for parameters in held if len(parameters) == len(trained)]
    if len(matching) != 1:
        return None
    parameters = dict(zip(trained, matching[0], strict=True))
    models = []
    for root in dict.fromkeys(name.partition(".")[0] for name in shapes):
        own = {name.partition(".")[2]: shape for name, shape in shapes.items() if name.partition(".")[0] == root}
        models += [
            model
            for model in find_models(own)
            if any(parameters.get(f"{root}.{name}") is parameter for name, parameter in model.named_parameters())
        ]
    together = TrainedTogether(models)
    return together if shapes_of(together) == shapes else None


class Helpers:
    """Holds optimizers' schedulers, gradient scalers and memwall's own, in an order that a new process finds."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self._found: list[Any] = []
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._num_commits = 0
        self._steps: list[Any] = []

    def look(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], objects: Iterable[Any]) -> None:
        """Adds those among `objects` that are new."""
        self._optimizers = optimizers
        known = {id(value) for value in self._found}
        new = [
            value
            for value in objects
            if isinstance(value, HELPERS) and id(value) not in known and _belongs(value, model, optimizers)
        ]
        inner = {id(part) for value in [*self._found, *new] for part in inner_schedulers(value)}
        # Two of a class are told apart by the state they have when they are found, which is the same in each process,
        # or else by the script's variables.
        self._found += sorted(
            (value for value in new if id(value) not in inner),
            key=lambda v: (self._name(v), repr(v.state_dict()), self._variables.name_of(v)),
        )

    def look_now_and_then(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Looks at the first commit, the 8th, the 64th, and so on, as it takes 0.1 s; and when a scheduler has come."""
        self._num_commits += 1
        # torch's schedulers put a counter around the optimizer's step (LRScheduler.__init__).
        steps, self._steps = self._steps, [optimizer.__dict__.get("step") for optimizer in optimizers]
        number = self._num_commits
        while number % _LOOK_RATIO == 0:
            number //= _LOOK_RATIO
        if number == 1 or any(one is not other for one, other in zip(steps, self._steps, strict=False)):
            self.look(model, optimizers, objects_of(HELPERS))

    def names(self) -> list[str]:
        """Returns the class of each, and the number of its optimizer where that is not the first."""
        return [self._name(value) for value in self._found]

    def states(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns name and state of each."""
        return [(self._name(value), value.state_dict()) for value in self._found]

    def restore(self, states: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        """Gives each the state that the one of its name had; returns what is left, for objects that are made later."""
        waiting = list(self._found)
        left = []
        for name, state in states:
            value = next((value for value in waiting if self._name(value) == name), None)
            if value is None:
                left.append((name, state))
                continue
            waiting.remove(value)
            value.load_state_dict(state)
        return left

    def _name(self, value: Any) -> str:
        name = type(value).__qualname__
        own = getattr(value, "optimizer", None)
        place = next((place for place, optimizer in enumerate(self._optimizers) if optimizer is own), 0)
        return f"{name} of optimizer {place}" if place else name


def objects_of(kinds: tuple[type, ...], *, without_garbage: bool = False) -> list[Any]:
    """Returns all objects of these kinds and their subclasses that the garbage collector knows.

    Args:
        without_garbage: whether what nothing leads to any more is collected first, which takes a full pass.
    """
    # By exact type: a fifth of the time that issubclass takes, and a proxy is not asked for its class.
    wanted: set[type] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if kind not in wanted:
            wanted.add(kind)
            left += type.__subclasses__(kind)
    is_frozen = gc.get_freeze_count() > 0  # by a script that wants collections to be quick: then they are not listed
    if is_frozen:
        gc.collect()  # a quick pass over what is not frozen: garbage would be, from now on
        gc.unfreeze()
    if without_garbage:
        gc.collect()
    # Objects refer to their type, but for those that are C's own. To look through them for a few types takes a third of
    # the time that a list takes.
    is_referred_to = len(wanted) <= _FEW_TYPES and all(each.__flags__ & _HEAP_TYPE for each in wanted)
    candidates = gc.get_referrers(*wanted) if is_referred_to else gc.get_objects()
    found = [value for value in candidates if type(value) in wanted]
    if is_frozen:
        gc.freeze()
    return found


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters, by name; of divided ones those of the whole."""
    return {name: tuple(parameter.shape) for name, parameter in standing_parameters(model).items()}


def _belongs(value: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    if isinstance(value, LRScheduler):
        return getattr(value, "optimizer", None) in optimizers
    if isinstance(value, GradientScaling):
        return value.is_of(model)
    return bool(value.is_enabled())
