"""Moves an optimizer's state, or its step, to another place, and says whether that can be done.

What opens something returns it with what brings the state back and closes the place.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.cpu_step import CpuStep
from memwall.apply.optimizer_state.cpu_step_checks import check_optimizer
from memwall.apply.optimizer_state.kept_space import KeptSpace, kept_space, open_scratch_pool
from memwall.apply.optimizer_state.partial_step import inner_step_of
from memwall.apply.optimizer_state.pinned import PinnedSpace
from memwall.apply.optimizer_state.shares import StateSpace
from memwall.apply.optimizer_state.staged import StagedSpace
from memwall.errors import ApplyError, StoreError
from memwall.planning.location import MOST_PLACED
from memwall.store.buckets import DiskSpace
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


def can_place(given: Optimizers) -> bool:
    """Returns whether the state of a model's optimizers can be on the next tier between steps; that of many cannot."""
    optimizers = optimizers_of(given)
    try:
        for optimizer in optimizers:
            check_can_be_away(optimizer)
    except ApplyError:
        return False
    return len(optimizers) <= MOST_PLACED


def why_not_on_cpu(given: Optimizers) -> str | None:
    """Returns None if the CPU can step what steps a model on CUDA, as far as it is known, else why not."""
    try:
        for optimizer in optimizers_of(given):
            check_can_step_on_cpu(optimizer)
    except ApplyError as error:
        return str(error)
    return None


def open_optimizer_state(
    optimizer: torch.optim.Optimizer,
    *,
    tier: Literal["disk", "host"] = "disk",
    disk: str | None,
    capacity_bytes: int | None,
    host_limit_bytes: int = 0,
    resident_bytes: int,
    bucket_bytes: int,
    min_bytes: int,
    is_recorded: bool = False,
    around_step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
) -> tuple[OptimizerState, Callable[[], None]]:
    """Puts an optimizer's state on a tier below its parameters.

    Args:
        tier: the disk, which state of CUDA parameters reaches through pinned host memory, or that memory.
        capacity_bytes: the most to take of the disk; None for no limit.
        host_limit_bytes: the most host memory to take, for parameters on CUDA.

    Raises:
        ApplyError: the optimizer cannot be stepped in parts; or it is to be in host memory, and its parameters are on a
            CPU, or the run is committed.
        StoreError: the directory is missing, read-only, full, or a RAM disk; or the host has no room.
    """
    kept: KeptSpace | None = None
    with ExitStack() as closing:
        if tier == "host":
            device = _device_above_host(optimizer)
            inner_step_of(optimizer, kept=PinnedSpace.kept, device=device)
            pinned = PinnedSpace(device, limit_bytes=host_limit_bytes)
            closing.callback(pinned.close)
            space: StateSpace = pinned
        elif device_of(optimizer).type == "cuda":
            device = _device_above_host(optimizer)
            inner_step_of(optimizer, device=device)
            pool = closing.enter_context(open_scratch_pool(disk, capacity_bytes))
            staged = StagedSpace(pool, device, limit_bytes=host_limit_bytes)
            closing.callback(staged.close)
            space = staged
        else:
            inner_step_of(optimizer)
            # Of a run that is committed, state lies where a commit need only name it.
            kept = kept_space()
            pool = kept.pool if kept is not None else closing.enter_context(open_scratch_pool(disk, capacity_bytes))
            space = DiskSpace(pool)
        state = OptimizerState(
            optimizer,
            space,
            resident_bytes=resident_bytes,
            bucket_bytes=bucket_bytes,
            min_bytes=min_bytes,
            is_recorded=is_recorded,
            around_step=around_step,
        )
        if kept is not None:
            kept.states.append(state)
            closing.callback(kept.states.remove, state)
        closing.callback(_bring_back, state)
        _log.info("%s of the optimizer's state are %s", format_bytes(state.away_bytes), space.place)
        return state, closing.pop_all().close


def open_cpu_step(
    optimizer: torch.optim.Optimizer, *, bucket_bytes: int, limit_bytes: int
) -> tuple[CpuStep, Callable[[], None]]:
    """Takes the step of an optimizer of CUDA parameters to the CPU, and its state with it.

    Args:
        limit_bytes: the most host memory to take.

    Raises:
        ApplyError: the optimizer cannot be stepped there, its parameters are there already, or the run is committed.
        StoreError: the host has no room.
    """
    state = CpuStep(
        optimizer,
        _device_above_host(optimizer),
        bucket_bytes=bucket_bytes,
        limit_bytes=limit_bytes,
    )
    _log.info("the optimizer's state is in host memory, where the CPU steps it")
    return state, state.undo


def check_can_be_away(optimizer: torch.optim.Optimizer) -> None:
    """Returns if its state can be on the tier below its parameters: on disk, or in host memory below CUDA.

    Raises:
        ApplyError: the optimizer cannot be stepped in parts, or its state has to stay for another reason.
    """
    if device_of(optimizer).type == "cuda":
        inner_step_of(optimizer, kept=PinnedSpace.kept, device=_device_above_host(optimizer))
    else:
        inner_step_of(optimizer)


def check_can_step_on_cpu(optimizer: torch.optim.Optimizer) -> None:
    """Returns if its step can be taken to the CPU, as its groups, parameters and gradients are now.

    Raises:
        ApplyError: it cannot, as `open_cpu_step` would say.
    """
    device = _device_above_host(optimizer)
    inner_step_of(optimizer, kept=CpuStep.kept, device=device)
    check_optimizer(optimizer, device)


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Returns where the first of its parameters is."""
    return next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))


def _device_above_host(optimizer: torch.optim.Optimizer) -> torch.device:
    """Returns the CUDA device of an optimizer whose state is to be in host memory."""
    device = device_of(optimizer)
    if device.type != "cuda":
        raise ApplyError(
            f"the plan keeps the {type(optimizer).__name__}'s state in host memory, and its parameters are on {device},"
            " which pins none: make the plan from a trace of this training"
        )
    if kept_space() is not None:
        raise ApplyError(
            "each step of this run is committed to disk, and the plan keeps the optimizer's state below the device, "
            "from where a commit does not take it; run without the checkpoint, or plan without moving optimizer state"
        )
    return device


def _bring_back(state: OptimizerState) -> None:
    try:
        state.undo()
    except StoreError as error:
        if state.failure is None:
            raise
        # The run has ended with the same error already.
        _log.error(
            "the optimizer's state could not be brought back into memory: %s; load it again before another step", error
        )
