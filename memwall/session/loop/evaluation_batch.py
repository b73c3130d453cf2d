"""Finds what a script is going to evaluate, before it does.

How many samples at once, its loaders or a call say; whether an average of weights too, the models that it has.
"""

import gc
import math
import sys
from types import GeneratorType
from typing import Any

import msgspec
from torch import nn

from memwall.checkpoint.discovery import find_models, objects_of, shapes_of
from memwall.predict.evaluation import HALF_PRECISION
from memwall.predict.first_step import FirstStep
from memwall.session.loop.longer_batch import Shape
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.records import Trace
from memwall.trace.together import models_of


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
