"""Says whether a model's parameters can be away between their uses, and puts them there."""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from memwall.apply.optimizer_state.kept_space import kept_space, open_scratch_pool
from memwall.apply.optimizer_state.open_state import can_place
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace, HostPlace
from memwall.apply.streaming.state_dicts import StateDictsBelow
from memwall.apply.streaming.stream_units import hooked_parameters
from memwall.errors import StoreError
from memwall.machine.process_group import num_processes
from memwall.torch_internals.compiler import is_compiled
from memwall.trace.optimizers import Optimizers, counted, joint_name, optimizers_of
from memwall.trace.together import models_of
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def why_not_streamed(model: nn.Module, given: Optimizers) -> str | None:
    """Returns None if a model's parameters can be away between their uses, as far as it is known, else why not."""
    device, *others = {parameter.device for parameter in model.parameters()} or {_CPU}
    if others or device.type not in ("cpu", "cuda"):
        return "parameters move from the memory of a CPU or of one CUDA device only"
    if len(models_of(model)) > 1:
        return "several models are trained together, and parameters leave memory for one alone"
    if any(map(is_compiled, model.modules())):
        return "compiled code uses parameters without the modules that they belong to"
    optimizers = optimizers_of(given)
    if len(optimizers) > 1:
        several = counted(joint_name(optimizers))
        return f"several optimizers step the model ({several}), and parameters leave memory for one alone"
    if not can_place(optimizers):
        return f"{joint_name(optimizers)} cannot be stepped a few parameters at a time"
    if device.type == "cuda" and kept_space() is not None:
        return "each step of this run is committed to disk, and a commit takes nothing from below a device"
    if num_processes() > 1:
        return f"this is one of {num_processes()} processes, which exchange gradients in memory"
    # Of those that are on disk already the hook is memwall's own.
    return hooked(name for name, parameter in hooked_parameters(model) if not is_streamed(parameter))


def hooked(names: Iterator[str]) -> str | None:
    """Returns why parameters with these names cannot be streamed; None where there is none."""
    return next((f"{name} has a hook that runs when its gradient is accumulated" for name in names), None)


def is_streamed(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter is on disk, or below its device, between its uses."""
    return type(parameter) is not nn.Parameter


def open_disk_tier(*, disk: str | None, capacity_bytes: int | None, window_bytes: int, min_bytes: int) -> ParameterTier:
    """Returns a tier for parameters on disk.

    Raises:
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    place = DiskPlace(open_scratch_pool(disk, capacity_bytes))
    # Of a run that is committed, parameters lie where a commit need only name them.
    kept = kept_space()
    values_place = None if kept is None else DiskPlace(kept.pool)
    return ParameterTier(place, window_bytes=window_bytes, min_bytes=min_bytes, values_place=values_place)


def open_parameter_streaming(
    model: nn.Module,
    *,
    disk: str | None,
    capacity_bytes: int | None,
    host_limit_bytes: int = 0,
    window_bytes: int,
    min_bytes: int,
    blocks: Sequence[str] | None = None,
    has_root: bool = True,
    built: ParameterTier | None = None,
) -> tuple[ParameterStreaming, Callable[[], None]]:
    """Puts a model's parameters and gradients on disk, or those of a CUDA device in the host's memory.

    Args:
        host_limit_bytes: the most host memory to take, for parameters on CUDA.
        built: has some of them already; it is closed as well where this fails.

    Returns:
        The engine, and what brings parameters back and closes files and threads.

    Raises:
        ApplyError: a block is missing or cannot be wrapped.
        StoreError: the directory is missing, read-only, full, or a RAM disk; or the host has no room.
    """
    kept = kept_space()
    tier, device = built, next((parameter.device for parameter in model.parameters()), _CPU)
    if tier is not None and tier.place.device != device:  # of another model than the one that is trained
        tier.close()
        tier = None
    if tier is not None and isinstance(tier.place, HostPlace):
        tier.place.set_limit(host_limit_bytes)
    elif device.type == "cuda":
        tier = ParameterTier(
            HostPlace(device, limit_bytes=host_limit_bytes), window_bytes=window_bytes, min_bytes=min_bytes
        )
    elif tier is None:
        tier = open_disk_tier(disk=disk, capacity_bytes=capacity_bytes, window_bytes=window_bytes, min_bytes=min_bytes)
    tier.forget_unused()
    tier.set_window(window_bytes)
    try:
        streaming = ParameterStreaming(model, tier, blocks=blocks, has_root=has_root)
    except BaseException:
        tier.close()
        raise
    if kept is not None:
        kept.parameters = streaming
    _log.info("%s of the parameters are %s", format_bytes(streaming.away_bytes), tier.place.words)
    saving = StateDictsBelow(model, tier) if isinstance(tier.place, HostPlace) else None

    def close() -> None:
        try:
            if saving is not None:
                saving.undo()
            streaming.undo()
            tier.close()
        except StoreError as error:
            if streaming.failure is None:
                raise
            _log.error(
                "the parameters could not be brought back into memory: %s; load the model again before it is used",
                error,
            )
        finally:
            if kept is not None:
                kept.parameters = None
            tier.place.close()

    return streaming, close
