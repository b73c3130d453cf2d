"""Jobs of Kubernetes that ask for what a plan needs: GPUs, memory, /dev/shm and disk of each pod, term by term.

Fields are those of kubeflow/trainer (trainer.kubeflow.org/v1alpha1; `runtimePatches` came with its v2.2.0),
volcano-sh/volcano (batch.volcano.sh/v1alpha1) and batch/v1. Files are JSON, which is YAML too.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.planning.planfile import Plan
from memwall.planning.technique import allowable, technique_of
from memwall.units import format_bytes

Kind = Literal["trainjob", "volcano", "job"]
KINDS: tuple[Kind, ...] = ("trainjob", "volcano", "job")
_NAME, _CONTAINER = "memwall", "node"
_SCRATCH = "/memwall-scratch"
_SHM_BYTES = 1 << 30
"""For the segments of NCCL and of data loaders' workers; /dev/shm counts against a pod's memory."""
_HOST_PROCESS_BYTES = 4 << 30
"""Assumed for code and libraries of a process that trains on a GPU: no forecast has them."""
_SLACK_BYTES = 1 << 30
"""Disk for logs and the container's own layer."""


class JobCommand(Struct, frozen=True, kw_only=True):
    """Says what runs, and on how many ranks."""

    image: str
    script: tuple[str, ...]
    """The script and its arguments, after `memwall run`."""
    num_ranks: int = 1
    num_ranks_per_node: int = 8


class _Needs(Struct, frozen=True, kw_only=True):
    """Holds what one pod asks for, each with where it comes from."""

    num_ranks: int
    is_on_gpu: bool
    memory: dict[str, int]
    disk: dict[str, int]

    @property
    def resources(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "memory": str(sum(self.memory.values())),
            "ephemeral-storage": str(sum(self.disk.values())),
        }
        asked |= {"nvidia.com/gpu": self.num_ranks} if self.is_on_gpu else {"cpu": self.num_ranks}
        limits = dict(asked)
        limits.pop("cpu", None)  # a run may compute with what is idle
        return {"requests": asked, "limits": limits}

    @property
    def annotations(self) -> dict[str, str]:
        terms = {"memory": self.memory, "ephemeral-storage": self.disk}
        return {
            f"memwall/{name}": "; ".join(f"{format_bytes(size)} {what}" for what, size in found.items() if size)
            for name, found in terms.items()
        }


def manifest(plan: Plan, kind: str, launch: JobCommand, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns a job of which each rank runs a script under the plan's budget.

    Args:
        kind: one of `KINDS`.
        environment: variables that have to be there before torch is imported.

    Raises:
        UsageError: there is no such kind, ranks do not fill nodes, or a plain Job would have several.
    """
    num_here = min(launch.num_ranks, launch.num_ranks_per_node)
    if launch.num_ranks % num_here:
        raise UsageError(
            f"--world-size {launch.num_ranks} does not fill nodes of {num_here} ranks; give --ranks-per-node a divisor"
        )
    num_nodes, needs = launch.num_ranks // num_here, _needs(plan, num_here)
    command = _command(plan, launch.script, num_here)
    variables = [{"name": name, "value": value} for name, value in sorted(environment.items())]
    metadata = {"name": _NAME, "annotations": needs.annotations}
    if kind == "trainjob":
        return _trainjob(metadata, launch.image, ("torchrun", *command), variables, needs, num_nodes)
    if kind == "volcano":
        start = f"exec torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node={num_here} "
        start += f"--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {shlex.join(command)}"
        return _volcano(metadata, _pod(launch.image, ("sh", "-c", start), variables, needs), num_nodes)
    if kind == "job":
        if num_nodes > 1:
            raise UsageError(f"a plain Job has one node, and this run has {num_nodes}; take --job trainjob or volcano")
        started = ("torchrun", "--standalone", f"--nproc-per-node={num_here}", *command)
        template = {"spec": _pod(launch.image, started, variables, needs) | {"restartPolicy": "Never"}}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
    raise UsageError(f"--job: '{kind}' is not known; expected one of {', '.join(KINDS)}")


def _needs(plan: Plan, num_ranks: int) -> _Needs:
    is_on_gpu = plan.forecast.device != "cpu"
    host_bytes = _host_bytes(plan)
    ranks = f"of {num_ranks} ranks: "
    if is_on_gpu:
        memory = {
            f"{ranks}host memory of the plan": num_ranks * host_bytes,
            # A run that is told --host takes nine tenths of what is free at most.
            f"{ranks}a tenth that --host leaves free": num_ranks * _tenth_of(host_bytes),
            f"{ranks}code and libraries, assumed": num_ranks * _HOST_PROCESS_BYTES,
        }
    else:
        memory = {f"{ranks}the budget": num_ranks * _budget_bytes(plan)}
    disk = "disk of the plan" if is_on_gpu else "disk of the plan, or of all tensors of the first step"
    return _Needs(
        num_ranks=num_ranks,
        is_on_gpu=is_on_gpu,
        memory=memory | {"/dev/shm": _SHM_BYTES},
        disk={f"{ranks}{disk}": num_ranks * _disk_bytes(plan), "logs and layers": _SLACK_BYTES},
    )


def _host_bytes(plan: Plan) -> int:
    """Returns what a rank takes of host memory at most, below a GPU."""
    phases = (plan.forecast.peak, *plan.forecast.phases.values())
    return max(phase.host_bytes or 0 for phase in phases)


def _tenth_of(host_bytes: int) -> int:
    """Returns what has to be free beside so much, where nine tenths of what is free may be taken."""
    return -(-host_bytes // 9)


def _disk_bytes(plan: Plan) -> int:
    """Returns what a rank has on disk at most. On a CPU its first step moves all that it can there."""
    forecast = plan.forecast
    planned_bytes = max(phase.disk_bytes or 0 for phase in (forecast.peak, *forecast.phases.values()))
    if forecast.device != "cpu":
        return planned_bytes
    return max(planned_bytes, (forecast.plain_peak or forecast.peak).allocated_bytes)


def _budget_bytes(plan: Plan) -> int:
    """Returns what a rank may use: the budget, or where the plan has none what it foresees and its margin."""
    forecast = plan.forecast
    return forecast.budget_bytes or forecast.peak.process_bytes + forecast.margin_bytes


def _command(plan: Plan, script: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Returns what each rank runs; sizes are those of all ranks of a pod, which divide them."""
    own = ["--budget", str(_budget_bytes(plan))]
    if plan.forecast.device != "cpu" and (host_bytes := _host_bytes(plan)):
        # With the tenth: the plan that is made there may need a little more than this one.
        own += ["--host", str(num_ranks * (host_bytes + _tenth_of(host_bytes)))]
    if _disk_bytes(plan):
        own += ["--disk", _SCRATCH]
    used = {technique_of(action).allow for action in plan.actions}
    if allowed := [kind for kind in allowable() if kind in used]:
        own += ["--allow", ",".join(allowed)]
    return ("-m", "memwall", "run", *own, *script)


def _mounts(needs: _Needs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns volumes, and where they are in the container."""
    disk_bytes = sum(needs.disk.values())
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(_SHM_BYTES)}},
        {"name": "scratch", "emptyDir": {"sizeLimit": str(disk_bytes)}},
    ]
    return volumes, [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "scratch", "mountPath": _SCRATCH}]


def _pod(image: str, command: Sequence[str], variables: list[dict[str, str]], needs: _Needs) -> dict[str, Any]:
    volumes, mounts = _mounts(needs)
    container = {
        "name": _CONTAINER,
        "image": image,
        "command": list(command),
        "env": variables,
        "resources": needs.resources,
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}


def _trainjob(
    metadata: dict[str, Any],
    image: str,
    command: Sequence[str],
    variables: list[dict[str, str]],
    needs: _Needs,
    num_nodes: int,
) -> dict[str, Any]:
    """Returns a TrainJob; of its pods only volumes go through patches, variables of the container do not."""
    volumes, mounts = _mounts(needs)
    pod = {"volumes": volumes, "containers": [{"name": _CONTAINER, "volumeMounts": mounts}]}
    of_node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    trainer = {
        "image": image,
        "command": list(command),
        "env": variables,
        "numNodes": num_nodes,
        "numProcPerNode": needs.num_ranks,
        "resourcesPerNode": needs.resources,
    }
    patch = {"template": {"spec": {"replicatedJobs": [of_node]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [{"manager": "memwall.io/export", "trainingRuntimeSpec": patch}],
        },
    }


def _volcano(metadata: dict[str, Any], pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """Returns a Volcano Job, whose plugin says a number of pods in WORLD_SIZE and needs a task that is the master."""
    counts = {"master": 1, "worker": num_nodes - 1}
    tasks = [
        {"name": name, "replicas": count, "template": {"spec": pod | {"restartPolicy": "OnFailure"}}}
        for name, count in counts.items()
        if count
    ]
    plugin = ["--master=master", "--worker=worker", "--port=23456"]
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"schedulerName": "volcano", "minAvailable": num_nodes, "plugins": {"pytorch": plugin}, "tasks": tasks},
    }
