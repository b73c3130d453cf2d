"""Finds what a script is going to evaluate, before it does.

How many samples at once, its loaders or a call say; whether an average of weights too, the models that it has.
"""

import ast
import gc
import math
import sys
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import msgspec
from torch import Tensor, nn

from memwall.checkpoint.discovery import find_models, objects_of, shapes_of
from memwall.predict.evaluation import HALF_PRECISION
from memwall.predict.first_step import FirstStep
from memwall.session.loop.longer_batch import Shape
from memwall.session.loop.script_text import Names, found_in_text
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.records import Trace
from memwall.trace.together import models_of

_NO_GRADIENTS = ("no_grad", "inference_mode")


def with_evaluation(first: FirstStep, trace: Trace, model: nn.Module, evaluated: Shape) -> FirstStep:
    """Returns what is known of a run, with the evaluation that begins, if it has more samples than those before.

    Args:
        evaluated: the shape of its batch.
    """
    batch = _samples(evaluated, trace)
    if batch <= first.evaluation_batch:
        return first
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    had_gradients = first.evaluation_batch > 0 and first.evaluates_with_gradients
    return msgspec.structs.replace(
        first, evaluation_batch=batch, evaluates_with_gradients=has_gradients or had_gradients
    )


def with_earlier(first: FirstStep, trace: Trace, model: nn.Module, evaluated: Shape) -> FirstStep:
    """Returns what is known of a run, with an evaluation from before its first step, if that was larger than a step.

    Others may follow, beside what the step has left.

    Args:
        evaluated: the shape of its batch; () for none.
    """
    is_larger = bool(evaluated) and _samples(evaluated, trace) > trace.micro_batch
    return with_evaluation(first, trace, model, evaluated) if is_larger else first


def with_called(first: FirstStep, trace: Trace, model: nn.Module, recorded: tuple[Shape, ...]) -> FirstStep:
    """Returns what is known of a run, with what its text evaluates as a whole: `model(X)` within `torch.no_grad()`.

    Args:
        recorded: the shapes of all tensors that the model was called with in the step.
    """
    names, models = Names(), models_of(model)

    def find(tree: ast.AST) -> Iterator[list[Shape]]:
        for call in _calls_without_gradients(tree):
            values = [names.value_of(argument) for argument in call.args]
            shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
            if len(shapes) == len(values) and any(names.value_of(call.func) is each for each in models):
                yield shapes

    for _, shapes in found_in_text(find, *_NO_GRADIENTS):
        is_alike = [*map(len, shapes)] == [*map(len, recorded)] and shapes[0][1:] == recorded[0][1:]
        if is_alike and shapes[0][0] > max(recorded[0][0], first.called_batch) and all(map(math.prod, recorded)):
            growths = [math.prod(shape) / math.prod(one) for shape, one in zip(shapes, recorded, strict=True)]
            growth = max(growths) if max(growths) > growths[0] else 1.0
            samples = math.ceil(trace.micro_batch * growths[0])
            first = msgspec.structs.replace(first, called_batch=samples, called_growth=growth)
    return first


def _calls_without_gradients(tree: ast.AST) -> Iterator[ast.Call]:
    for part in ast.walk(tree):
        said = [item.context_expr for item in part.items] if isinstance(part, (ast.With, ast.AsyncWith)) else []
        said = part.decorator_list if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) else said
        if any(
            getattr(inner, "attr", getattr(inner, "id", "")) in _NO_GRADIENTS for one in said for inner in ast.walk(one)
        ):
            yield from (inner for inner in ast.walk(part) if isinstance(inner, ast.Call) and inner.args)


def with_loaders(first: FirstStep, trace: Trace) -> FirstStep:
    """Returns what is known of a run, with the evaluation that its data loaders are for."""
    batch = largest_batch(trace.micro_batch)
    return first if batch <= first.evaluation_batch else msgspec.structs.replace(first, evaluation_batch=batch)


def with_average(first: FirstStep, trace: Trace, model: nn.Module) -> FirstStep:
    """Returns what is known of a run, with whether another model of the same form as the trained one is there.

    That makes no difference, and is not looked for, where nothing in the step was in half precision.
    """
    if all(one.dtype not in HALF_PRECISION for one in trace.steps[0].storages):
        return first
    with without_subclass_functions():
        own = {id(parameter) for parameter in model.parameters()}
        found = [other for trained in models_of(model) for other in find_models(shapes_of(trained))]
        has_average = any(all(id(p) not in own for p in other.parameters()) for other in found)
    return msgspec.structs.replace(first, has_average=has_average)


def _samples(evaluated: Shape, trace: Trace) -> int:
    """Returns how many samples of the recorded length a batch has as many numbers as; those of a step if unknown."""
    recorded = trace.input_shape
    if len(evaluated) != len(recorded) or not math.prod(recorded):
        return trace.micro_batch
    return math.ceil(trace.micro_batch * math.prod(evaluated) / math.prod(recorded))


def largest_batch(trained: int) -> int:
    """Returns the largest batch of any data loader that is alive; 0 where none is larger than what is trained.

    One that is iterated while a step ends is the training's own, whose batches the script takes in parts.

    Args:
        trained: samples in a batch of the training step. One of the loaders must have that many, or batches are made
            otherwise than loaders say.
    """
    kind: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if kind is None or trained <= 0:
        return 0
    loaders = [(size, each) for each in objects_of((kind,)) if (size := _batch_of(each))]
    if all(size != trained for size, _ in loaders):
        return 0
    larger = [(size, each.batch_sampler) for size, each in loaders if size > trained]
    if not larger:
        return 0
    # What torch's samplers of batches are iterated by are generators, which hold them until their end.
    held = {id(each) for generator in objects_of((GeneratorType,)) for each in gc.get_referents(generator)}
    return max((size for size, sampler in larger if id(sampler) not in held), default=0)


def _batch_of(loader: Any) -> int:
    """Returns the samples in a loader's largest batch, of which it may have fewer than it is set to; 0 if unknown."""
    size = getattr(loader, "batch_size", None) or 0
    try:
        return min(size, len(loader.sampler))
    except Exception:  # of a stream, or a script's own
        return int(size)
