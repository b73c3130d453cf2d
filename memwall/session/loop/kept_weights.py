"""Finds whether a script is going to keep a copy of its weights, as early stopping does, before it does so.

A copy that stays is in every step after it, and the first one is made long after the plan: the script's text says it.
"""

import ast
import linecache
import os
import warnings
from collections.abc import Iterator

import msgspec
from torch import nn

from memwall.predict.cuda_allocator.step_peaks import segment_bytes_of
from memwall.predict.first_step import FirstStep
from memwall.session.loop.kept_copies import copies_bytes
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.records import Trace
from memwall.trace.source_lines import user_files

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
_MOST_CHARACTERS = 1_000_000


def with_kept_weights(first: FirstStep, trace: Trace, model: nn.Module) -> FirstStep:
    """Returns what is known of a run, with the copy of its weights that it is going to keep where the model is.

    One that is there already, as a loop makes it before its first step, takes the place of the next.
    """
    is_on_device = trace.device != "cpu"
    kept_at = line_that_keeps_weights(is_on_device=is_on_device)
    if not kept_at:
        return first
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        sizes = [local_part(each).nbytes for each in (*model.parameters(), *model.buffers())]
    if copies_bytes(model) >= _WHOLE_SHARE * sum(sizes):
        return first
    kept_bytes = segment_bytes_of(sizes) if is_on_device else sum(sizes)
    return msgspec.structs.replace(first, kept_bytes=kept_bytes, kept_at=kept_at)


def line_that_keeps_weights(*, is_on_device: bool) -> str:
    """Returns the first line of the script that keeps a copy of a state dict, as `train.py:41`; "" if none does.

    Args:
        is_on_device: whether a copy counts that stays on a device, and one in the machine's memory does not.
    """
    for path in user_files():
        text = "".join(linecache.getlines(path))
        if "state_dict" not in text or len(text) > _MOST_CHARACTERS:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # Python has said them when it read the file
                line = next(_kept(ast.parse(text), is_on_device=is_on_device), 0)
        except (SyntaxError, ValueError, RecursionError):
            continue  # a notebook's cell with commands of its own, or an expression without end
        if line:
            return f"{os.path.basename(path)}:{line}"
    return ""


def _kept(tree: ast.AST, *, is_on_device: bool) -> Iterator[int]:
    """Yields the lines that keep a copy in a loop, or in a function without one, which a loop may call."""
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.Module, *_FUNCTIONS)):
            own = list(_own_parts(scope))
            loops = [part for part in own if isinstance(part, _LOOPS)]
            is_called = not loops and not isinstance(scope, ast.Module)
            for part in own if is_called else [inner for loop in loops for inner in _own_parts(loop)]:
                value = _stored(part)
                if value is not None and _copies_weights(value, is_on_device=is_on_device):
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


def _copies_weights(value: ast.expr, *, is_on_device: bool) -> bool:
    """Tells whether an expression holds `deepcopy(model.state_dict())`, or a comprehension that copies each of it."""
    parts = list(ast.walk(value))
    calls = {_called(part) for part in parts if isinstance(part, ast.Call)}
    if "state_dict" not in calls or calls.intersection(_PASSES):
        return False
    is_on_host = calls.intersection(_LEAVES) or any(
        isinstance(part, ast.Constant) and part.value == "cpu" for part in parts
    )
    if is_on_device and is_on_host:
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
