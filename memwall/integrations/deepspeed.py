"""Leaves sharding and swapping to DeepSpeed's engine where several devices take part, and does the rest of a plan.

`plan.deepspeed_config()` is what DeepSpeed is given. Its engine trains; `apply_rest` does to the model in it what
DeepSpeed has nothing for.
"""

from collections.abc import Mapping
from typing import Any

import torch

from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import Zero, handler_of
from memwall.errors import IntegrationError
from memwall.integrations.preflight import check_config
from memwall.planning.action import Action
from memwall.planning.deepspeed import not_expressed
from memwall.planning.planfile import Plan
from memwall.trace.attached import attach_hook


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
