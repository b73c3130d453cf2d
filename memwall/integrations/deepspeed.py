"""Leaves sharding and swapping to DeepSpeed's engine where several devices take part, and does the rest of a plan.

`plan.deepspeed_config()` is what DeepSpeed is given. Its engine trains; `apply_rest` does to the model in it what
DeepSpeed has nothing for. Resuming goes through `load_checkpoint`, which puts back what DeepSpeed would lose without a
word (docs/deepspeed.md has the reproduction).
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import Zero, handler_of
from memwall.errors import IntegrationError
from memwall.integrations.deepspeed_resume import check_resumable, restore_swapped
from memwall.integrations.preflight import check_config
from memwall.planning.action import Action
from memwall.planning.deepspeed import deepspeed_config, not_expressed, remarks
from memwall.planning.planfile import Plan
from memwall.trace.attached import attach_hook

__all__ = [
    "Rest",
    "apply_rest",
    "check_config",
    "check_resume",
    "deepspeed_config",
    "load_checkpoint",
    "not_expressed",
    "remarks",
    "require_deepspeed",
]


def require_deepspeed() -> None:
    """Checks that DeepSpeed is installed.

    Raises:
        IntegrationError: it is not; the message says what to install.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise IntegrationError(
            "DeepSpeed is not installed; install it with `pip install 'torch-memwall[deepspeed]'`. It compiles its "
            "operators when they are first used: that takes a C++ compiler, and for NVMe the headers of libaio "
            "(Debian and Ubuntu: g++ and libaio-dev)"
        )


class Rest:
    """Holds the actions that memwall applies to the model in a DeepSpeed engine; see `apply_rest`."""

    def __init__(self, engine: Any, actions: tuple[Action, ...], disk: str | None) -> None:
        applied = AppliedPlan(
            engine.module,
            actions,
            block_order=(),
            disk=disk,
            disk_capacity_bytes=None,
            allocator=AllocatorHandler(),
            micro=MicroBatches(),
            keeper=StateKeeper(None, None),
            parameters=ParameterKeeper(None, None),
            is_cooperative=False,
            is_watched=False,
        )
        applied.apply()
        self._applied = applied

        def before_forward(*_: Any) -> None:
            if engine.micro_steps % engine.gradient_accumulation_steps() == 0 and torch.is_grad_enabled():
                applied.begin_step()

        applied.on_undo(attach_hook(engine.module.register_forward_pre_hook, before_forward).undo)

    def undo(self) -> None:
        """Takes everything back, last first.

        Raises:
            MemwallError: something of it failed, after all else was taken back.
        """
        self._applied.undo()


def apply_rest(engine: Any, plan: Plan, *, disk: str | None = None) -> Rest:
    """Does to the model in a DeepSpeed engine what of the plan DeepSpeed has nothing for; `undo` takes it back.

    Args:
        engine: what `deepspeed.initialize` returned first.
        disk: folder for saved tensors that leave memory; by default the system's temporary directory.

    Raises:
        IntegrationError: an action cannot be combined with DeepSpeed, or with the engine's ZeRO stage; "auto" is left
            in the configuration.
        ApplyError: a block of the plan is not in the model; nothing has changed then.
    """
    config = _configuration(engine)
    check_config(config)
    zero = Zero(
        stage=engine.zero_optimization_stage(),
        lends_weights=_device_of(config, "offload_param") == "nvme" and engine.dp_world_size == 1,
    )
    handlers = [handler_of(action) for action in not_expressed(plan)]
    for handler in handlers:
        reason = handler.why_not_under_deepspeed(zero)
        if reason is not None:
            raise IntegrationError(reason)
    return Rest(engine, tuple(handler.under_deepspeed() for handler in handlers), disk)


def check_resume(config: Mapping[str, Any]) -> None:
    """Checks that DeepSpeed's own `load_checkpoint`, which the Trainer calls, restores all that training had.

    Args:
        config: the configuration that the run is resumed with.

    Raises:
        IntegrationError: it would lose state, or fail; the message has the ways out.
    """
    if _device_of(config, "offload_optimizer") == "nvme":
        raise IntegrationError(
            "DeepSpeed's own load_checkpoint loses an optimizer on NVMe: it copies the moments back beside the run and "
            "never reads them, so that Adam starts again from zero, and parameter groups below 1 MiB get back the "
            "values they were initialized with; nothing says so. Load with memwall.integrations."
            'load_checkpoint, which puts both back, or train and resume with offload_optimizer.device "cpu" and '
            "parameters not on NVMe"
        )
    _check_parameters(config)


def load_checkpoint(engine: Any, load_dir: str, tag: str | None = None, **arguments: Any) -> Any:
    """Calls `engine.load_checkpoint(load_dir, tag, **arguments)`, and with the optimizer on NVMe does what that omits.

    Raises:
        IntegrationError: the checkpoint is cut short or does not fit the engine, this version of DeepSpeed is another
            than known, or it cannot load this at all; nothing was loaded.
    """
    require_deepspeed()
    config = _configuration(engine)
    if _device_of(config, "offload_optimizer") != "nvme":
        _check_parameters(config)
        return engine.load_checkpoint(load_dir, tag, **arguments)
    for name in ("load_optimizer_states", "load_module_only", "load_module_strict"):
        if name in arguments:
            raise IntegrationError(
                f"{name} is given, and with the optimizer on NVMe a checkpoint is loaded whole or not at all: weights "
                "are in the same files as the moments; leave it out"
            )
    tag = tag if tag is not None else _latest(load_dir)
    saved = check_resumable(engine, load_dir, tag)
    found = engine.load_checkpoint(load_dir, tag, **arguments)
    restore_swapped(engine, saved)
    return found


def _latest(load_dir: str) -> str:
    path = Path(load_dir) / "latest"
    try:
        return path.read_text().strip()
    except OSError as error:
        raise IntegrationError(
            f"cannot read {path}: {error.strerror or error}; give the folder that engine.save_checkpoint was given, or "
            "a tag"
        ) from error


def _check_parameters(config: Mapping[str, Any]) -> None:
    if _device_of(config, "offload_param") == "nvme":
        raise IntegrationError(
            "DeepSpeed cannot resume with parameters on NVMe and the optimizer elsewhere: its load_checkpoint ends "
            "with \"'NoneType' object has no attribute 'data'\". Have both on NVMe, or parameters in memory"
        )


def _configuration(engine: Any) -> Mapping[str, Any]:
    """Returns what an engine was configured with."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if not isinstance(config, Mapping):
        raise IntegrationError(
            f"expected the engine that deepspeed.initialize returns first, found {type(engine).__name__}"
        )
    return config


def _device_of(config: Mapping[str, Any], section: str) -> str:
    """Says where a section of zero_optimization has its bytes: "none", "cpu" or "nvme"."""
    device = ((config.get("zero_optimization") or {}).get(section) or {}).get("device", "none")
    return str(getattr(device, "value", device))
