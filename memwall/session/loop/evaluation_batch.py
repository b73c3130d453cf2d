"""Finds how many samples a script is going to evaluate at once, before it does: loaders say so, or a call."""

import gc
import math
import sys
from types import GeneratorType
from typing import Any

import msgspec

from memwall.checkpoint.discovery import objects_of
from memwall.predict.evaluation import evaluation_bytes
from memwall.predict.first_step import FirstStep
from memwall.session.loop.longer_batch import Shape
from memwall.trace.records import Trace


def with_evaluation(first: FirstStep, trace: Trace, evaluated: Shape = ()) -> FirstStep:
    """Returns what a run needs from its first step on, with an evaluation of more samples than a step has.

    Args:
        evaluated: the shape of the batch with which an evaluation begins; () where none does. The largest batches of
            data loaders count as well.
    """
    if trace.device != "cpu":
        return first
    batch = max(largest_batch(trace.micro_batch), _samples(evaluated, trace))
    if not batch:
        return first
    foreseen_bytes = evaluation_bytes(trace, batch=batch)
    return msgspec.structs.replace(
        first,
        needed_bytes=max(first.needed_bytes, foreseen_bytes),
        evaluation_batch=batch,
        evaluation_bytes=foreseen_bytes,
    )


def _samples(evaluated: Shape, trace: Trace) -> int:
    """Returns how many samples of the recorded length a batch has as many numbers as; 0 where it is not larger."""
    recorded = trace.input_shape
    if len(evaluated) != len(recorded) or not math.prod(recorded):
        return 0
    growth = math.prod(evaluated) / math.prod(recorded)
    return math.ceil(trace.micro_batch * growth) if growth > 1 else 0


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
