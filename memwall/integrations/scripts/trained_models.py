"""Finds the models that a script trains, from those that are alive when one of them is called.

A script tells nobody which models it trains, but its optimizers hold their parameters. The garbage collector knows
both. A model is the largest module that is called; what holds several of them, as a class with the whole loop, is none.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

import torch
from msgspec import Struct
from torch import nn

from memwall.checkpoint.discovery import objects_of
from memwall.torch_internals.autograd import execution_is_transformed
from memwall.trace.together import TrainedTogether


class TrainedModels(Struct, frozen=True, kw_only=True):
    """Holds what was found beside a module that is called."""

    models: tuple[nn.Module, ...]
    """The module, and those that hold the other parameters of the script's optimizers."""
    is_trained: bool
    """Whether an optimizer holds a parameter of the module; without any optimizer of modules it counts as trained."""
    has_optimizer: bool
    """Whether any optimizer is alive that is not for copies alone, which a script carries back by hand."""
    of_copies: tuple[torch.optim.Optimizer, ...] = ()
    """Those that train what the module is called with in place of its parameters."""
    is_carried_back: bool = False
    """Whether the module counts as trained as its parameters look like copies of trained ones in lower precision: a
    teacher looks so too."""


def trained_with(
    called: nn.Module, known: Iterable[nn.Module] = (), *, foreign: Container[torch.optim.Optimizer] = ()
) -> TrainedModels:
    """Returns the models that a script trains, one of which is about to be called.

    Args:
        known: models that are trained for sure.
        foreign: optimizers that are not the script's: they were there before it began.
    """
    found: list[nn.Module] = []
    for model in (*known, called):
        inner = {id(module) for module in model.modules()}
        found = [other for other in found if id(other) not in inner]
        if all(id(model) not in {id(module) for module in other.modules()} for other in found):
            found.append(model)
    held = {id(parameter) for model in found for parameter in model.parameters()}
    optimizers, modules = _alive(foreign)
    trained = _parameters_of(optimizers)
    if trained.keys() - held:
        del optimizers, modules
        # Of an earlier part of the script, cycles may be left that nobody holds any more.
        optimizers, modules = _alive(foreign, without_garbage=True)
        trained = _parameters_of(optimizers)
    is_carried_back = not trained.keys() & held and _are_carried_back(called, optimizers, modules)
    if is_carried_back:
        trained = {}  # the loop itself changes the model's parameters, and that ends its steps
    is_trained = not trained or any(id(parameter) in trained for parameter in called.parameters())
    of_copies = _of_copies(called, optimizers, modules)
    found += _others(modules, found, [number for number in trained if number not in held])
    return TrainedModels(
        models=tuple(found),
        is_trained=is_trained or bool(of_copies),
        has_optimizer=bool(trained),
        of_copies=tuple(of_copies),
        is_carried_back=is_carried_back,
    )


def optimizers_alive() -> list[torch.optim.Optimizer]:
    """Returns every optimizer of the process."""
    return objects_of((torch.optim.Optimizer,))


def _alive(
    foreign: Container[torch.optim.Optimizer], *, without_garbage: bool = False
) -> tuple[list[torch.optim.Optimizer], list[nn.Module]]:
    """Returns every optimizer that is the script's, and every module."""
    alive = objects_of((torch.optim.Optimizer, nn.Module), without_garbage=without_garbage)
    optimizers = [each for each in alive if isinstance(each, torch.optim.Optimizer) and each not in foreign]
    return optimizers, [each for each in alive if isinstance(each, nn.Module) and _is_model(each)]


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, None]:
    """Returns ids of what they train, in their order."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return {id(parameter): None for group in groups for parameter in group["params"]}


def _of_copies(
    called: nn.Module, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that train what torch.func calls a model with in place of its parameters.

    Within a transform, or where it is called with what was computed of them, as with parameters in lower precision, no
    module holds what they train meanwhile: it is known by its shapes.
    """
    of = [(one, [p for group in getattr(one, "param_groups", ()) for p in group["params"]]) for one in optimizers]
    if not execution_is_transformed():
        copies = {id(given) for given in called.parameters() if not isinstance(given, nn.Parameter)}
        found = [optimizer for optimizer, trained in of if any(id(each) in copies for each in trained)]
        if found or not copies:
            return found
    held = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    left = [(optimizer, {each.shape for each in trained if id(each) not in held}) for optimizer, trained in of]
    shapes = [parameter.shape for parameter in called.parameters() if parameter.requires_grad]
    is_trained = bool(shapes) and set().union(*(found for _, found in left)).issuperset(shapes)
    return [optimizer for optimizer, found in left if found] if is_trained else []


def _are_carried_back(
    called: nn.Module, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> bool:
    """Tells whether optimizers train tensors of no module, enough for copies of all that a model's gradients are of.

    Mixed precision by hand does that: float32 copies of a bfloat16 model, each by itself or all in one, or a second
    model of them.
    """
    if execution_is_transformed() or any(not isinstance(given, nn.Parameter) for given in called.parameters()):
        return False  # called with the copies themselves
    trained = {id(p): p for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]}
    asked = [parameter for parameter in called.parameters() if parameter.requires_grad]
    if any(id(parameter) in trained for module in modules for parameter in module.parameters(recurse=False)):
        is_lower = all(each.is_floating_point() and each.dtype.itemsize == 2 for each in asked)
        wide = Counter(each.shape for each in trained.values() if each.dtype == torch.float32)
        return is_lower and bool(asked) and Counter(each.shape for each in asked) <= wide
    num_trained: int = sum(parameter.numel() for parameter in trained.values())
    return num_trained >= sum(parameter.numel() for parameter in asked) > 0


def _others(modules: Iterable[nn.Module], found: Iterable[nn.Module], trained: Sequence[int]) -> list[nn.Module]:
    """Returns the largest modules that hold parameters, and nothing of what was found.

    Args:
        trained: ids of the parameters that an optimizer holds and no module that was found, in the optimizer's order.
    """
    if not trained:
        return []
    left, places = set(trained), {number: place for place, number in enumerate(trained)}
    parts = {id(module) for model in found for module in model.modules()}
    others: list[tuple[int, int, int, nn.Module]] = []
    for module in modules:
        held = left.intersection(map(id, module.parameters()))
        if held and parts.isdisjoint(map(id, module.modules())):
            others.append((-len(held), -sum(1 for _ in module.modules()), min(map(places.__getitem__, held)), module))
    chosen = []
    # The largest first; of two that hold the same, as a wrapper and what is in it, the outer one. Of two that are as
    # large, the optimizer's first: another process of the script is to name them alike.
    for *_, module in sorted(others, key=lambda each: each[:3]):
        own = left.intersection(map(id, module.parameters()))
        if own:
            left = left - own
            chosen.append(module)
    return chosen


def _is_model(module: nn.Module) -> bool:
    """Tells whether a module is one of the script's, and made to its end."""
    return type(module) is not TrainedTogether and "_parameters" in vars(module)


def as_one(models: tuple[nn.Module, ...]) -> nn.Module:
    """Returns one model, or several as one."""
    return models[0] if len(models) == 1 else TrainedTogether(models)
