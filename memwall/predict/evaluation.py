"""Foresees from a recorded training step what runs between steps holds: an evaluation, and copies of the weights.

An evaluation is the step's forward, without what backward would need.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch

from memwall.predict.curve import live_curve, live_peak_bytes
from memwall.trace.records import Step, Storage, Trace
from memwall.trace.recurrent import LAYER

# Of what oneDNN's recurrent layer keeps for backward, an inference has states, but no gates. It allocates up to about
# twice this, and writes to half of it.
_RECURRENT_SHARE = 3 / 16
HALF_PRECISION = ("bfloat16", "float16")
# Weights that are joined, and then made bytes of for a digest, are there three times.
_NUM_COPIES = 2
# Part of a step's gradients that is there at once at most where they are let go one by one.
_GRADIENTS_AT_ONCE = 0.5


def evaluation_bytes(
    trace: Trace,
    step: Step,
    *,
    batch: int,
    growth: float = 1.0,
    keeps_gradients: bool = False,
    may_lack_autocast: bool = False,
) -> int:
    """Returns the most that the process holds in an evaluation.

    A tensor lives until all but autograd let go of it, which the recording saw. What grows with the batch grows in
    proportion; all else stands as it does between training steps, as do samples of which the script holds all at once.

    Args:
        step: the recorded step, with state and parameters where they are.
        batch: samples that are evaluated at once.
        growth: times as large as in the step what is made that does not grow with the samples.
        keeps_gradients: whether those stand as well that are let go before the next step's forward.
        may_lack_autocast: whether it may be without the autocast that the step ran under; the larger of both counts.
    """
    end = next((operation for name, operation in step.marks if name == "backward"), len(step.ops))
    scale = batch / trace.micro_batch if trace.micro_batch else 1.0
    step = _without_gates(step, trace.names)
    if _are_parts(step.storages, trace):
        fixed = (s if s.category != "input" else msgspec.structs.replace(s, batched=False) for s in step.storages)
        step = msgspec.structs.replace(step, storages=tuple(fixed))
    standing = _optimizer_end(step) if keeps_gradients else len(step.ops)
    if growth > 1.0:
        storages = tuple(_grown(storage, growth) for storage in step.storages)
        step = msgspec.structs.replace(step, storages=storages)
    kinds = [step.storages]
    if may_lack_autocast and not _is_in_half_precision(trace):
        kinds.append(_without_autocast(step.storages))
    evaluated = [tuple(_evaluated(storage, scale, end, standing) for storage in storages) for storages in kinds]
    forwards = [msgspec.structs.replace(step, ops=step.ops[:end], storages=storages) for storages in evaluated]
    most_bytes = max(live_peak_bytes(forward, trace.device) for forward in forwards)
    # The workspace is what the process has beside tensors, Python's objects say: it does not grow with the batch.
    return trace.base_bytes + trace.workspace_bytes + most_bytes


def copying_bytes(trace: Trace, recorded: Step, step: Step, *, keeps_copy: bool) -> int:
    """Returns what the process holds between steps with two copies of the weights that train; 0 where that is no more.

    A step with all gradients at once, state, and an optimizer's temporaries, has about as much. One whose optimizers
    step within its backward, and let each gradient go, has not, nor has one beside a copy that stays, nor one whose
    state passes through memory in buckets.

    Args:
        recorded: the step as it ran.
        step: the same, with state and parameters where a plan has them.
        keeps_copy: whether the script keeps a copy, of which the trace knows.
    """
    gradients = [storage for storage in recorded.storages if storage.category == "gradient"]
    gradient_bytes = sum(storage.nbytes for storage in gradients)
    if not keeps_copy and _state_bytes(step) >= _state_bytes(recorded):
        if not _has_steps_in_backward(recorded):
            return 0
        at_once_bytes = live_curve(gradients, len(recorded.ops), device=trace.device).max()
        if at_once_bytes > _GRADIENTS_AT_ONCE * gradient_bytes:
            return 0
    end = len(step.ops)
    stand = (one for one in step.storages if one.device_type == trace.device and (one.birth < 0 or one.death >= end))
    standing_bytes = sum(storage.nbytes for storage in stand)
    return trace.base_bytes + trace.workspace_bytes + standing_bytes + _NUM_COPIES * gradient_bytes


def _state_bytes(step: Step) -> int:
    return sum(storage.nbytes for storage in step.storages if storage.category == "optimizer_state")


def _has_steps_in_backward(step: Step) -> bool:
    """Returns whether a backward goes on after an optimizer has stepped."""
    phases = [name for name, _ in step.marks if name != "other"]
    return ("optimizer", "backward") in pairwise(phases)


def _are_parts(storages: Sequence[Storage], trace: Trace) -> bool:
    """Returns whether the batch was taken out of a larger tensor: nothing has exactly its bytes."""
    batch_bytes = math.prod(trace.input_shape) * getattr(torch, trace.input_dtype, torch.uint8).itemsize
    inputs = [storage.nbytes for storage in storages if storage.category == "input"]
    return max(inputs, default=0) > batch_bytes and batch_bytes not in inputs


def _is_in_half_precision(trace: Trace) -> bool:
    """Returns whether most bytes of parameters are in half precision: results are then so without autocast."""
    parameters = [one for one in trace.steps[0].storages if one.category == "parameter"]
    half_bytes = sum(one.nbytes for one in parameters if one.dtype in HALF_PRECISION)
    return 2 * half_bytes > sum(one.nbytes for one in parameters)


def _without_autocast(storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
    """Returns storages as they are without autocast: results in half precision are then in single precision.

    What operators hold for themselves, such as a convolution's copy of its input in another layout, doubles with them.
    """
    # Results that do not grow with the batch are copies of weights.
    return tuple(
        msgspec.structs.replace(one, nbytes=2 * one.nbytes if one.batched else 0)
        if one.birth >= 0 and (one.dtype in HALF_PRECISION or _is_workspace(one))
        else one
        for one in storages
    )


def _is_workspace(storage: Storage) -> bool:
    """Returns whether an operator holds bytes for itself alone, which grow with its inputs."""
    return storage.dtype == "uint8" and storage.batched and storage.death <= storage.birth + 1


def _without_gates(step: Step, names: Sequence[str]) -> Step:
    """Returns the step with oneDNN's recurrent layers as in an inference, of which all results grow with the batch."""
    storages = list(step.storages)
    for op in step.ops:
        if names[op.name] == str(LAYER) and storages[op.outputs[-1]].dtype == "uint8":
            workspace = storages[op.outputs[-1]]
            for index in op.outputs:
                storages[index] = msgspec.structs.replace(storages[index], batched=workspace.batched)
            nbytes = int(workspace.nbytes * _RECURRENT_SHARE)
            storages[op.outputs[-1]] = msgspec.structs.replace(workspace, nbytes=nbytes)
    return msgspec.structs.replace(step, storages=tuple(storages))


def _optimizer_end(step: Step) -> int:
    """Returns the operation that follows the optimizer's last one, where a loop may let go of gradients."""
    begins = [begin for _, begin in step.marks] + [len(step.ops)]
    after = (begins[number + 1] for number, (name, _) in enumerate(step.marks) if name == "optimizer")
    return max(after, default=len(step.ops))


def _grown(storage: Storage, growth: float) -> Storage:
    is_made = storage.category in ("activation", "temporary") and storage.birth >= 0
    if storage.batched or not is_made:
        return storage
    return msgspec.structs.replace(storage, nbytes=int(storage.nbytes * growth))


def _evaluated(storage: Storage, scale: float, end: int, standing: int) -> Storage:
    is_standing = storage.category in ("optimizer_state", "gradient") and storage.death >= standing
    if is_standing or storage.birth < 0:
        birth, death = -1, end
    else:
        birth, death = storage.birth, min(storage.dropped, storage.death)
    nbytes = int(storage.nbytes * scale) if storage.batched else storage.nbytes
    return msgspec.structs.replace(storage, birth=birth, death=min(death, end) if birth >= 0 else end, nbytes=nbytes)
