"""DeepSpeed as the engine where several devices take part: it shards and swaps, memwall does the rest of a plan.

`plan.deepspeed_config()` is what DeepSpeed is given. Its engine trains; `apply_rest` does to the model in it what
DeepSpeed has nothing for. Resuming goes through `load_checkpoint`, which puts back what DeepSpeed would lose without a
word (docs/deepspeed.md has the reproduction).
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.cuda_setting import require_cuda_setting, restore_variables
from memwall.apply.executor import BlockExecutor, resolve_blocks
from memwall.apply.offload.parking import open_engine
from memwall.errors import IntegrationError
from memwall.integrations.deepspeed_resume import check_resumable, restore_swapped
from memwall.integrations.preflight import check_config
from memwall.patches import undo_all
from memwall.planning.actions import AllocatorReuse, Offload, Recompute
from memwall.planning.deepspeed import deepspeed_config, not_expressed, remarks
from memwall.planning.planfile import Plan
from memwall.trace.attached import attach_hook
from memwall.trace.modules import root_names

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
    """Returns where DeepSpeed is installed.

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
    """The actions that memwall applies to the model in a DeepSpeed engine; see `apply_rest`."""

    def __init__(self, engine: Any, plan: Plan, disk: str | None) -> None:
        self._engine = engine
        self._undo: list[Callable[[], None]] = []
        self._allocator = AllocatorHandler()
        try:
            self._apply_blocks(plan, disk)
            for action in plan.actions:
                if isinstance(action, AllocatorReuse):
                    self._apply_allocator(action)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Takes everything back, last first, whatever of it fails."""
        undos, self._undo = self._undo, []
        undo_all(undos)

    def _apply_blocks(self, plan: Plan, disk: str | None) -> None:
        model, offload = self._engine.module, [a for a in plan.actions if isinstance(a, Offload)]
        saved = None
        if offload:
            saved, close = open_engine(
                [model],
                disk=disk,
                capacity_bytes=None,
                window_bytes=offload[0].window_bytes,
                min_bytes=offload[0].min_bytes,
            )
            self._undo.append(close)
        executor = BlockExecutor(resolve_blocks([model], root_names([model])), (), engine=saved)
        executor.apply([a for a in plan.actions if isinstance(a, Recompute | Offload)])
        self._undo.append(executor.undo)

        def before_forward(*_: Any) -> None:
            if self._engine.micro_steps % self._engine.gradient_accumulation_steps() == 0 and torch.is_grad_enabled():
                self._allocator.hold_limit()
                executor.begin_step()

        self._undo.append(attach_hook(model.register_forward_pre_hook, before_forward).remove)

    def _apply_allocator(self, action: AllocatorReuse) -> None:
        if action.cuda_setting:
            require_cuda_setting(action.cuda_setting)
            self._undo.append(restore_variables)
            return
        # The plan's limit is of a process without DeepSpeed in it, whose buffers would count against the heap.
        self._allocator.apply(action.policy)
        self._undo.append(self._allocator.undo)


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
    is_aliased = _device_of(config, "offload_param") == "nvme" and engine.dp_world_size == 1
    for action in not_expressed(plan):
        if not isinstance(action, Recompute | Offload | AllocatorReuse):
            raise IntegrationError(
                f"the plan has the action '{action.__struct_config__.tag}', which memwall applies to a model that it "
                "trains alone; make the plan without it, or run without DeepSpeed"
            )
        if isinstance(action, Offload) and engine.zero_optimization_stage() == 3:
            raise IntegrationError(
                f"the plan moves what '{action.block}' saves to the {action.tier}, and under ZeRO stage 3 weights come "
                "and go in the tensors that autograd saved; take stage 2 (plan.deepspeed_config(stage=2)), or make "
                "the plan without a disk, which recomputes instead"
            )
        if isinstance(action, Recompute) and is_aliased:
            raise IntegrationError(
                f"the plan recomputes '{action.block}', and on one rank ZeRO stage 3 lends weights out of its NVMe "
                "buffers: recomputation saves such a weight, the buffer goes to the next parameter, and gradients are "
                "wrong without a word. Keep parameters in memory, train on two ranks or more, or make a plan that "
                "recomputes nothing"
            )
    return Rest(engine, plan, disk)


def check_resume(config: Mapping[str, Any]) -> None:
    """Returns where DeepSpeed's own `load_checkpoint`, which the Trainer calls, restores all that training had.

    Args:
        config: the configuration that the run is resumed with.

    Raises:
        IntegrationError: it would lose state, or fail; the message has the ways out.
    """
    if _device_of(config, "offload_optimizer") == "nvme":
        raise IntegrationError(
            "DeepSpeed's own load_checkpoint loses an optimizer on NVMe: it copies the moments back beside the run and "
            "never reads them, so that Adam starts again from zero, and parameter groups below 1 MiB get back the "
            "values they were initialized with; nothing says so. Load with memwall.integrations.deepspeed."
            'load_checkpoint, which puts both back, or train and resume with offload_optimizer.device "cpu" and '
            "parameters not on NVMe"
        )
    _check_parameters(config)


def load_checkpoint(engine: Any, load_dir: str, tag: str | None = None, **arguments: Any) -> Any:
    """`engine.load_checkpoint(load_dir, tag, **arguments)`, and with the optimizer on NVMe what that leaves out.

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
    """What an engine was configured with."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if not isinstance(config, Mapping):
        raise IntegrationError(
            f"expected the engine that deepspeed.initialize returns first, found {type(engine).__name__}"
        )
    return config


def _device_of(config: Mapping[str, Any], section: str) -> str:
    """Where a section of zero_optimization has its bytes: "none", "cpu" or "nvme"."""
    device = ((config.get("zero_optimization") or {}).get(section) or {}).get("device", "none")
    return str(getattr(device, "value", device))
