"""A plan in the formats of what launches training: the files' contents, and what of the plan they do not hold."""

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from memwall.apply.technique import handler_of
from memwall.errors import UsageError
from memwall.planning.actions import Action
from memwall.planning.deepspeed import deepspeed_config, not_expressed, remarks
from memwall.planning.planfile import Plan

__all__ = ["TARGETS", "Exported", "Target", "exported"]

Target = Literal["trainer", "accelerate", "deepspeed", "env"]
TARGETS: tuple[Target, ...] = ("trainer", "accelerate", "deepspeed", "env")

_LATER = {
    "fsdp": "sharding and offload to disk both exist under DeepSpeed: --to deepspeed",
    "kubernetes": "write the peak of `memwall plan --json` into the pod's resources, and start with --to env",
}


class Exported(Struct, frozen=True, kw_only=True):
    """Files by path, and what must be done besides."""

    files: dict[str, bytes]
    kept: tuple[Action, ...]
    """Actions that memwall must still apply, in the process that trains."""
    remarks: tuple[str, ...]


def exported(plan: Plan, target: str, output: Path, *, world_size: int = 1, disk: str | None = None) -> Exported:
    """The plan for a target.

    Args:
        output: the file to be; a second one, where there is one, lies beside it.
        world_size: ranks that will train, each with the plan's batch.
        disk: folder for what DeepSpeed moves to NVMe.

    Raises:
        UsageError: there is no such target, or not yet.
        IntegrationError: DeepSpeed cannot do its part.
        StoreError: the disk is unsuitable.
    """
    if target == "deepspeed":
        return _deepspeed(plan, output, world_size, disk)
    if target == "trainer":
        return _trainer(plan, output, world_size, disk)
    if target == "accelerate":
        return _accelerate(plan, output, world_size, disk)
    if target == "env":
        return _env(plan, output)
    if target in _LATER:
        raise UsageError(f"--to {target} does not exist yet; {_LATER[target]}")
    raise UsageError(f"--to: '{target}' is not known; expected one of {', '.join(TARGETS)}")


def _deepspeed(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    config = deepspeed_config(plan, world_size=world_size, disk=disk)
    return Exported(files={str(output): _json(config)}, kept=not_expressed(plan), remarks=remarks(plan, config))


def _trainer(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    """Arguments as `HfArgumentParser.parse_json_file` reads them."""
    arguments: dict[str, Any] = {"use_cpu": True} if plan.forecast.device == "cpu" else {}
    for action in plan.actions:
        arguments.update(handler_of(action).trainer_arguments)
    if world_size > 1:
        config = deepspeed_config(plan, world_size=world_size, disk=disk, for_hugging_face=True)
        files = {str(output): _json(arguments | {"deepspeed": config})}
        return Exported(files=files, kept=not_expressed(plan), remarks=remarks(plan, config))
    return Exported(files={str(output): _json(arguments)}, kept=_besides(plan), remarks=())


def _accelerate(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    """A file for `accelerate launch --config_file`, in JSON, which is YAML too."""
    is_cpu = plan.forecast.device == "cpu"
    launch: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if world_size == 1 else "DEEPSPEED",
        "num_machines": 1,
        "num_processes": world_size,
        "machine_rank": 0,
        "use_cpu": is_cpu,
    }
    arguments = plan.accelerate_kwargs()
    precision = arguments.get("mixed_precision", "no")
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    said = []
    if accumulation > 1 or (precision != "no" and world_size > 1):
        said.append(
            "this file has no place for accumulation, nor beside a DeepSpeed file for precision: write "
            "Accelerator(**plan.accelerate_kwargs()) in the script"
        )
    if world_size == 1:
        files = {str(output): _json(launch | {"mixed_precision": precision})}
        return Exported(files=files, kept=_besides(plan), remarks=tuple(said))
    config = deepspeed_config(plan, world_size=world_size, disk=disk, for_hugging_face=True)
    beside = output.with_name(f"{output.stem}.deepspeed.json").absolute()
    # Of the keys that go with stages and offload Accelerate refuses each beside a file that may hold them too.
    launch["deepspeed_config"] = {
        "deepspeed_config_file": str(beside),
        "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
    }
    files = {str(output): _json(launch), str(beside): _json(config)}
    return Exported(files=files, kept=not_expressed(plan), remarks=(*said, *remarks(plan, config)))


def _env(plan: Plan, output: Path) -> Exported:
    """Lines NAME=value: for `docker run --env-file`, systemd, or `set -a; . FILE`."""
    values: dict[str, str] = {}
    kept: list[Action] = []
    said: list[str] = []
    for action in plan.actions:
        handler = handler_of(action)
        if handler.environment is None:
            kept.append(action)
        else:
            values |= handler.environment
        if handler.division:
            size = handler.division[0]
            said.append(f"no variable sets the batch size: the script's data loader needs batch_size={size}")
    if any(name.startswith("ACCELERATE_") for name in values):
        said.append("variables named ACCELERATE_ are read by Accelerate only; another loop does not see them")
    text = "".join(f"{name}={value}\n" for name, value in sorted(values.items()))
    return Exported(files={str(output): text.encode()}, kept=tuple(kept), remarks=tuple(said))


def _besides(plan: Plan) -> tuple[Action, ...]:
    """What is left to memwall where the loop is given arguments."""
    return tuple(action for action in plan.actions if not handler_of(action).can_be_set_by_loop)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"
