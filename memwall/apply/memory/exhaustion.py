"""Memory ran out: telling that failure from others, and what is known of it."""

import errno
import re
import traceback
from typing import Literal

import torch
from msgspec import Struct

from memwall.errors import OutOfMemoryError
from memwall.machine.meter import Meter
from memwall.store.room import asked_bytes_of
from memwall.units import format_bytes

Phase = Literal["forward", "backward", "optimizer step", "evaluation", "saving", "between steps"]
"""Says what runs when memory runs out, as far as hooks on the model and its optimizers can tell."""

# Failures of allocation that torch raises as a plain RuntimeError: its CPU allocator, the driver of CUDA or HIP, and
# libraries by their own words (aten/src/ATen/cuda/Exceptions.h, aten/src/ATen/miopen/Exceptions.h). NCCL wraps the
# driver's (ncclUnhandledCudaError), and says the cause in its last error.
_RUNTIME = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|(?:CUDA|HIP) error: out of memory|"
    r"(?:CU|HIP)(?:BLAS|SOLVER|SPARSE|RAND|FFT)_STATUS_ALLOC\w*|CUSOLVER_STATUS_ALLOC_FAILED|rocblas_status_memory_error|"
    r"CUDNN_STATUS_(?:INTERNAL_ERROR_HOST_)?ALLOC\w*_FAILED|miopenStatusAllocFailed|"
    r"ncclUnhandledCudaError[\s\S]*out of memory|Cuda failure 2 'out of memory'|Cuda failure 'out of memory'"
)
_ELSEWHERE = {
    "evaluation": "evaluate smaller batches, and keep less of what they give",
    "saving": "save straight to a file, one part after the other, not into memory",
    "between steps": "look for what allocates there, before or after the training step",
}


class Exhaustion(Struct, frozen=True, kw_only=True):
    """Describes one failure to get memory."""

    phase: Phase
    asked_bytes: int
    """Says what could not be had; 0 where the failure does not say."""
    held_bytes: int
    """Says what the process held at most since the phase's step began, which it is certain that it can have."""


def exhaustion_of(error: BaseException, phase: Phase, meter: Meter) -> Exhaustion | None:
    """Returns what a failure says, if it is one to get memory; None of any other.

    Args:
        meter: of the device that the model is on.
    """
    if not is_exhaustion(error):
        return None
    if phase == "forward" and _came_through_backward(error):
        phase = "backward"
    held_bytes = max(meter.now_bytes(), meter.peak_bytes())
    return Exhaustion(phase=phase, asked_bytes=asked_bytes_of(error), held_bytes=held_bytes)


def as_error(
    found: Exhaustion, *, num_steps: int, budget_bytes: int, reason: str, next_budget_bytes: int, foreseen: str = ""
) -> OutOfMemoryError:
    """Returns the error that ends a run.

    Args:
        num_steps: that were complete.
        reason: why a training step cannot be done again.
        next_budget_bytes: the budget to run again with, 0 if there is none for which less is needed.
        foreseen: what was foreseen of a training step, and what holds most in it.
    """
    asked = format_bytes(found.asked_bytes) if found.asked_bytes else "memory"
    budget = f" of a budget of {format_bytes(budget_bytes, rounding='down')}" if budget_bytes else ""
    elsewhere = _ELSEWHERE.get(found.phase)
    if elsewhere is not None:
        where = f"in {found.phase}" if found.phase != "between steps" else "outside any training step"
        where += f", after step {num_steps}" if num_steps else ", before the first step"
        reason, advice, next_budget_bytes = "the training batch and its plan stay as they are", elsewhere, 0
    else:
        where = f"in the {found.phase} of step {num_steps + 1}"
        budget += f"; {foreseen}" if foreseen else ""
        advice = "use a smaller batch and accumulate, or give the process more memory"
        if next_budget_bytes:
            advice = "run again with a budget of "
            advice += f"{format_bytes(next_budget_bytes, rounding='down')}, for which a plan needs less"
    return OutOfMemoryError(
        f"out of memory {where}: {asked} could not be had while the process held "
        f"{format_bytes(found.held_bytes)}{budget}; {reason}; {advice}",
        phase=found.phase,
        asked_bytes=found.asked_bytes,
        held_bytes=found.held_bytes,
        next_budget_bytes=next_budget_bytes,
    )


def forget_frames(error: BaseException) -> None:
    """Lets go of the tensors that the frames of a failure hold, and of the failures that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def is_exhaustion(error: BaseException) -> bool:
    """Returns whether a failure is one to get memory, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _RUNTIME.search(str(error)) is not None


def _came_through_backward(error: BaseException) -> bool:
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name == "_engine_run_backward" for name in names)  # torch/autograd/graph.py, since torch 2.2
