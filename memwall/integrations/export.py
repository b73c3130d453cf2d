"""Puts a plan into the formats of what launches training, and says what of the plan they do not hold."""

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.integrations.dlrover import tuning_file
from memwall.integrations.kubernetes import JobCommand, manifest
from memwall.planning.action import Action
from memwall.planning.deepspeed import deepspeed_config, not_expressed, remarks
from memwall.planning.planfile import Plan
from memwall.planning.technique import technique_of
from memwall.versioned_files import json_bytes

Target = Literal["trainer", "accelerate", "deepspeed", "env", "kubernetes", "dlrover"]
TARGETS: tuple[Target, ...] = ("trainer", "accelerate", "deepspeed", "env", "kubernetes", "dlrover")


class Exported(Struct, frozen=True, kw_only=True):
    """Files by path, and what must be done besides."""

    files: dict[str, bytes]
    kept: tuple[Action, ...]
    """Actions that memwall must still apply, in the process that trains."""
    remarks: tuple[str, ...]
    expresses_any: bool = True
    """Whether the files say anything of the plan."""


def exported(
    plan: Plan,
    target: str,
    output: Path,
    *,
    world_size: int = 1,
    disk: str | None = None,
    job: str = "trainjob",
    launch: JobCommand | None = None,
) -> Exported:
    """Returns the plan for a target.

    Args:
        output: the file to be; a second one, where there is one, lies beside it.
        world_size: ranks that will train, each with the plan's batch.
        disk: folder for what DeepSpeed moves to NVMe.
        job: the kind of Kubernetes' job.
        launch: what such a job runs.

    Raises:
        UsageError: there is no such target, or a job has nothing to run.
        IntegrationError: DeepSpeed cannot do its part, or the file that is there is no tuning file of DLRover.
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
    if target == "kubernetes":
        return _kubernetes(plan, output, job, launch)
    if target == "dlrover":
        return _dlrover(plan, output)
    raise UsageError(f"--to: '{target}' is not known; expected one of {', '.join(TARGETS)}")


def _deepspeed(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    config = deepspeed_config(plan, world_size=world_size, disk=disk)
    return Exported(files={str(output): json_bytes(config)}, kept=not_expressed(plan), remarks=remarks(plan, config))


def _trainer(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    """Arguments as `HfArgumentParser.parse_json_file` reads them."""
    arguments: dict[str, Any] = {"use_cpu": True} if plan.forecast.device == "cpu" else {}
    for action in plan.actions:
        found = technique_of(action).training_arguments(action)
        arguments |= {name: value for name, value in found.items() if value is not False}
    if world_size > 1:
        config = deepspeed_config(plan, world_size=world_size, disk=disk, for_hugging_face=True)
        files = {str(output): json_bytes(arguments | {"deepspeed": config})}
        return Exported(files=files, kept=not_expressed(plan), remarks=remarks(plan, config))
    set_here = [name for name in arguments if name != "use_cpu"]
    files = {str(output): json_bytes(arguments)}
    return Exported(files=files, kept=_not_set_by_loop(plan), remarks=(), expresses_any=bool(set_here))


def _accelerate(plan: Plan, output: Path, world_size: int, disk: str | None) -> Exported:
    """Returns a file for `accelerate launch --config_file`, in JSON, which is YAML too."""
    is_cpu = plan.forecast.device == "cpu"
    launch: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if world_size == 1 else "DEEPSPEED",
        "num_machines": 1,
        "num_processes": world_size,
        "machine_rank": 0,
        "use_cpu": is_cpu,
    }
    kwargs = plan.accelerate_kwargs()
    precision = kwargs.get("mixed_precision", "no")
    plugin = kwargs.get("gradient_accumulation_plugin")
    accumulation = kwargs.get("gradient_accumulation_steps", 1) if plugin is None else plugin.num_steps
    said = []
    if accumulation > 1 or (precision != "no" and world_size > 1):
        said.append(
            "this file has no place for accumulation, nor beside a DeepSpeed file for precision: write "
            "Accelerator(**plan.accelerate_kwargs()) in the script"
        )
    if world_size == 1:
        files = {str(output): json_bytes(launch | {"mixed_precision": precision})}
        return Exported(files=files, kept=_not_set_by_loop(plan), remarks=tuple(said))
    config = deepspeed_config(plan, world_size=world_size, disk=disk, for_hugging_face=True)
    beside = output.with_name(f"{output.stem}.deepspeed.json").absolute()
    # Of the keys that go with stages and offload Accelerate refuses each beside a file that may hold them too.
    launch["deepspeed_config"] = {
        "deepspeed_config_file": str(beside),
        "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
    }
    files = {str(output): json_bytes(launch), str(beside): json_bytes(config)}
    return Exported(files=files, kept=not_expressed(plan), remarks=(*said, *remarks(plan, config)))


def _env(plan: Plan, output: Path) -> Exported:
    """Returns lines NAME=value: for `docker run --env-file`, systemd, or `set -a; . FILE`.

    The three do not read quotes alike, so no value may need them: `AllocatorReuse` refuses what is not a plain setting.
    """
    values, kept, said = _variables(plan)
    text = "".join(f"{name}={value}\n" for name, value in sorted(values.items()))
    return Exported(files={str(output): text.encode()}, kept=tuple(kept), remarks=tuple(said))


def _kubernetes(plan: Plan, output: Path, job: str, launch: JobCommand | None) -> Exported:
    """Returns a job in which `memwall run` makes a plan of its own for the same budget: no action is left over."""
    if launch is None:
        raise UsageError("--to kubernetes needs --image IMAGE and --script SCRIPT, what each rank runs")
    found = manifest(plan, job, launch, _variables(plan)[0])
    remarks = ["each rank plans anew for that budget, in its first step"]
    if plan.forecast.device != "cpu":
        remarks.append("host memory of a process's code and libraries is an assumption, 4 GiB: see the annotations")
    if job == "trainjob":
        remarks.append("its runtimePatches need Kubeflow Trainer 2.2 or later")
    return Exported(files={str(output): json_bytes(found)}, kept=(), remarks=tuple(remarks))


def _dlrover(plan: Plan, output: Path) -> Exported:
    """Returns DLRover's tuning file, which has words for a rank's batch alone; what one there says besides is kept."""
    content, said = tuning_file(plan, output)
    kept = tuple(action for action in plan.actions if technique_of(action).batch_parts(action) is None)
    return Exported(files={str(output): content}, kept=kept, remarks=said)


def _variables(plan: Plan) -> tuple[dict[str, str], list[Action], list[str]]:
    """Returns the environment variables of a plan, the actions that have none, and what is to be said of them."""
    values: dict[str, str] = {}
    kept: list[Action] = []
    said: list[str] = []
    for action in plan.actions:
        technique = technique_of(action)
        found = technique.environment(action)
        if found is None:
            kept.append(action)
        values |= found or {}
        remark = technique.environment_remark(action)
        said += [remark] if remark else []
    if any(name.startswith("ACCELERATE_") for name in values):
        said.append("variables named ACCELERATE_ are read by Accelerate only; another loop does not see them")
    return values, kept, said


def _not_set_by_loop(plan: Plan) -> tuple[Action, ...]:
    return tuple(action for action in plan.actions if not technique_of(action).is_set_by_loop)
