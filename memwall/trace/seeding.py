"""Seeds what a recorded step draws from; hears when CUDA generators are seeded, and records the step that follows.

The next step makes the random state of a recurrent layer's dropout anew, while the one before is still there.

Source: torch/random.py, `manual_seed`; aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, `no_reset_rnn_state_`;
native/cudnn/RNN.cpp, `get_dropout_state` (torch 2.13).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from memwall.errors import MemwallError
from memwall.patches import Patches
from memwall.trace.records import Trace
from memwall.trace.recurrent import drops_between_layers
from memwall.trace.spec import describe_error
from memwall.trace.trace_builder import TraceBuilder, run_evaluated, run_recorded
from memwall.trace.workload import Workload

_SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


_hearing: list[Callable[[], object]] = []


@contextmanager
def drawing_alike() -> Iterator[None]:
    """Has what is drawn within be the same each time, from torch's CPU generator, Python's and numpy's.

    What a model draws may decide how much it computes, as the spans that wav2vec masks do. All three are put back.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed CUDA devices, which are not put back
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def hearing_seeds(hear: Callable[[], object]) -> Iterator[None]:
    """Calls a function whenever a generator of a CUDA device is to be seeded, or its state to be set, within.

    Neither is done: fake tensors draw nothing, and a device that this process has keeps its numbers for the user.
    """

    def seeded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        tell_seeded()

    _hearing.append(hear)
    try:
        with Patches("hears when random generators are seeded") as patches:
            for name in _SETTERS:
                patches.wrap(torch.cuda, name, seeded)
            yield
    finally:
        _hearing.remove(hear)


def tell_seeded() -> None:
    """Has all who hear of seeds hear of one."""
    for hear in tuple(_hearing):
        hear()


def made_hearing(make: Callable[[], Any]) -> tuple[Any, bool]:
    """Returns what a function makes, and whether it seeds generators meanwhile."""
    heard: list[None] = []
    with hearing_seeds(lambda: heard.append(None)):
        return make(), bool(heard)


def evaluated_after(
    builder: TraceBuilder,
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    evaluated: Any,
    *,
    is_seeding: bool,
    num_micro_batches: int = 1,
    seed: Callable[[], object] = tell_seeded,
) -> tuple[Trace | None, str]:
    """Returns an evaluation, and behind it the training step that follows, if the model notices fresh seeds there.

    Args:
        builder: has recorded training steps.
        evaluated: the batch that is evaluated.
        is_seeding: whether making that has seeded the generators.
        num_micro_batches: as in `run_recorded`.
        seed: seeds the generators of the device that the step runs on; fake tensors are only told so.

    Returns:
        The evaluation, and ""; or None, and why there is none: the training steps stand all the same.
    """
    trained = builder, workload, model, optimizer
    try:
        evaluation = run_evaluated(*trained, evaluated)
        if not is_seeding or not drops_between_layers(model):
            return evaluation, ""
        seed()
        trace = run_recorded(*trained, batch, num_steps=1, num_micro_batches=num_micro_batches)
    except Exception as error:  # whatever a model's own code raises
        return None, str(error) if isinstance(error, MemwallError) else describe_error(error)
    return msgspec.structs.replace(evaluation, names=trace.names, steps=(*evaluation.steps, trace.steps[-1])), ""
