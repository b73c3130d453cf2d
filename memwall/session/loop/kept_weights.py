"""Finds whether a script is going to keep a copy of its weights, as early stopping does, before it does so.

A copy that stays is in every step after it, and the first one is made long after the plan: the script's text says it.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from torch import nn

from memwall.predict.cuda_allocator.step_peaks import segment_bytes_of
from memwall.predict.first_step import FirstStep
from memwall.session.loop.kept_copies import copies_bytes
from memwall.session.loop.script_text import Names, found_in_text
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.records import Trace
from memwall.trace.together import models_of

_COPIES = ("deepcopy", "clone", "copy")
"""Names of what copies a tensor, or all of a dictionary."""
_LEAVES = ("cpu", "numpy")
"""Names of what takes a tensor off a device."""
_PASSES = ("load_state_dict", "save", "dumps", "dump")
"""Names of what a copy is made for that does not stay."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.DictComp, ast.ListComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_WHOLE_SHARE = 0.9
"""Part of the weights that a copy of them has at least: small ones may lie among others."""
_NOT_OF_MODELS = ("opt", "sched", "scaler", "sampler", "loader")
"""Parts of the names of what else has a state dict."""


def with_kept_weights(first: FirstStep, trace: Trace, model: nn.Module) -> FirstStep:
    """Returns what is known of a run, with the copy of its weights that it is going to keep where the model is.

    One that is there already, as a loop makes it before its first step, takes the place of the next.
    """
    is_on_device = trace.device != "cpu"
    kept_at = line_that_keeps_weights(models_of(model), is_on_device=is_on_device)
    if not kept_at:
        return first
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        sizes = [local_part(each).nbytes for each in (*model.parameters(), *model.buffers())]
    if copies_bytes(model) >= _WHOLE_SHARE * sum(sizes):
        return first
    kept_bytes = segment_bytes_of(sizes) if is_on_device else sum(sizes)
    return msgspec.structs.replace(first, kept_bytes=kept_bytes, kept_at=kept_at)


def line_that_keeps_weights(models: Sequence[nn.Module] = (), *, is_on_device: bool) -> str:
    """Returns the first line of the script that keeps a copy of its weights, as `train.py:41`; "" if none does.

    That is one of a state dict, of a list of parameters, or of a model itself by a name that stands for it.

    Args:
        models: those that are trained.
        is_on_device: whether a copy counts that stays on a device, and one in the machine's memory does not.
    """
    find = partial(_kept, names=Names(), models=models, is_on_device=is_on_device)
    return next((f"{name}:{line}" for name, line in found_in_text(find, "state_dict", "clone", "deepcopy")), "")


def _kept(tree: ast.AST, *, names: Names, models: Sequence[nn.Module], is_on_device: bool) -> Iterator[int]:
    """Yields the lines that keep a copy in a loop, or in a function without one, which a loop may call."""

    def is_model(part: ast.AST) -> bool:
        return any(names.value_of(part) is model for model in models)

    for scope in ast.walk(tree):
        if isinstance(scope, (ast.Module, *_FUNCTIONS)):
            own = list(_own_parts(scope))
            loops = [part for part in own if isinstance(part, _LOOPS)]
            is_called = not loops and not isinstance(scope, ast.Module)
            parts = own if is_called else [inner for loop in loops for inner in _own_parts(loop)]
            chosen = {id(inner) for part in parts if isinstance(part, ast.If) for inner in _own_parts(part)}
            for part in parts:
                value = _stored(part)
                if value is None or (is_on_device and _is_on_host(value)):
                    continue
                # What each turn of a loop copies is in the recorded step, and a function's own goes with it.
                stays = _is_given_on(part) or (id(part) in chosen and not is_called)
                takes_place = any(map(names.is_module, _targets(part)))
                if (
                    _copies_weights(value)
                    or (stays and _copies_parameters(value))
                    or (not takes_place and _copies(value, is_model))
                ):
                    yield value.lineno


def _own_parts(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields what lies within a scope, but for the insides of functions and classes there."""
    for part in ast.iter_child_nodes(scope):
        yield part
        if not isinstance(part, (*_FUNCTIONS, ast.ClassDef)):
            yield from _own_parts(part)


def _stored(part: ast.AST) -> ast.expr | None:
    """Returns what a statement stores, or gives to whom it was called by; None where it does neither."""
    if isinstance(part, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return)):
        return part.value
    is_append = isinstance(part, ast.Call) and _called(part) == "append" and len(part.args) == 1
    return part.args[0] if isinstance(part, ast.Call) and is_append else None


def _targets(part: ast.AST) -> list[ast.expr]:
    """Returns what a statement assigns to."""
    return [one for target in getattr(part, "targets", ()) for one in getattr(target, "elts", (target,))]


def _is_given_on(part: ast.AST) -> bool:
    """Tells whether what a statement stores lives longer than the variables of its function."""
    targets = _targets(part)
    return not targets or any(isinstance(one, (ast.Attribute, ast.Subscript)) for one in targets)


def _is_on_host(value: ast.expr) -> bool:
    """Tells whether an expression takes a tensor off a device."""
    is_named = any(isinstance(part, ast.Constant) and part.value == "cpu" for part in ast.walk(value))
    return is_named or _has_call(value, _LEAVES)


def _copies(value: ast.expr, is_model: Callable[[ast.AST], bool]) -> bool:
    """Tells whether an expression holds `deepcopy(model)`."""
    calls = [part for part in ast.walk(value) if isinstance(part, ast.Call) and _called(part) == "deepcopy"]
    return any(len(call.args) == 1 and is_model(call.args[0]) for call in calls)


def _copies_parameters(value: ast.expr) -> bool:
    """Tells whether an expression is `[p.clone() for p in model.parameters()]`, or has that; not of their gradients."""
    return any(
        _has_call(part.elt, _COPIES) and not any(getattr(inner, "attr", "") == "grad" for inner in ast.walk(part.elt))
        for part in (value, *getattr(value, "elts", ()))
        if isinstance(part, ast.ListComp) and _has_call(part.generators[0].iter, ("parameters",))
    )


def _copies_weights(value: ast.expr) -> bool:
    """Tells whether an expression holds `deepcopy(model.state_dict())`, or a comprehension that copies each of it."""
    parts = list(ast.walk(value))
    calls = {_called(part) for part in parts if isinstance(part, ast.Call)}
    if "state_dict" not in calls or calls.intersection(_PASSES):
        return False
    for part in parts:
        if isinstance(part, ast.Call) and _called(part) == "deepcopy" and _has_state_dict(part):
            return True
        if isinstance(part, _COMPREHENSIONS) and any(_has_state_dict(one.iter) for one in part.generators):
            return _has_call(part.value if isinstance(part, ast.DictComp) else part.elt, _COPIES)
    return False


def _has_state_dict(within: ast.AST) -> bool:
    """Tells whether an expression asks something for its state dict that may be a model."""
    for part in ast.walk(within):
        if isinstance(part, ast.Call) and _called(part) == "state_dict" and isinstance(part.func, ast.Attribute):
            owner = part.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if not any(word in name.lower() for word in _NOT_OF_MODELS):
                return True
    return False


def _has_call(within: ast.AST, names: tuple[str, ...]) -> bool:
    return any(isinstance(part, ast.Call) and _called(part) in names for part in ast.walk(within))


def _called(call: ast.Call) -> str:
    """Returns the last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
