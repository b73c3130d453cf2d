"""Jobs of Kubernetes ask for what the plan needs, and each sum is told by its terms."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from plans import a_plan

from memwall.cli.app import main
from memwall.planning.forecast import PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast

GIB = 1 << 30


def on_gpu() -> Plan:
    plan = a_plan()
    peak = replace(plan.forecast.peak, host_bytes=3 * GIB, disk_bytes=5 * GIB)
    return replace(plan, forecast=replace(plan.forecast, device="h100-80gb", budget_bytes=70 * GIB, peak=peak))


def written(plan: Plan, folder: Path, *options: str, status: int = 0) -> Any:
    plan.save(str(folder / "plan.json"))
    asked = ["--image", "train:1", "--script", "train.py --name 'a b'", *options]
    target = str(folder / "job.yaml")
    assert main(["export", str(folder / "plan.json"), "--to", "kubernetes", "-o", target, *asked]) == status
    return None if status else json.loads(Path(target).read_text())


TENTH = 8 * -(-3 * GIB // 9)
OWN = ["--budget", str(70 * GIB), "--host", str(8 * 3 * GIB + TENTH), "--disk", "/memwall-scratch"]
COMMAND = ["-m", "memwall", "run", *OWN, "train.py", "--name", "a b"]
ASKED = {
    "memory": str((8 * (3 + 4) + 1) * GIB + TENTH),
    "ephemeral-storage": str((8 * 5 + 1) * GIB),
    "nvidia.com/gpu": 8,
}


def test_a_train_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(on_gpu(), tmp_path, "--world-size", "16")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("train:1", 2, 8)
    assert trainer["command"] == ["torchrun", *COMMAND]
    assert trainer["resourcesPerNode"] == {"requests": ASKED, "limits": ASKED}
    free_bytes = int(ASKED["memory"]) - (8 * 4 + 1) * GIB
    assert free_bytes * 9 // 10 >= 24 * GIB, "what --host asks for can be pinned in that memory"
    assert job["metadata"]["annotations"] == {
        "memwall/memory": "24.00 GiB of 8 ranks: host memory of the plan; "
        "2.67 GiB of 8 ranks: a tenth that --host leaves free; "
        "32.00 GiB of 8 ranks: code and libraries, assumed; 1.00 GiB /dev/shm",
        "memwall/ephemeral-storage": "40.00 GiB of 8 ranks: disk of the plan; 1.00 GiB logs and layers",
    }
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(GIB)}}
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "shm", "mountPath": "/dev/shm"}
    said = " ".join(capsys.readouterr().out.split())
    assert "is an assumption, 4 GiB" in said
    assert "runtimePatches need Kubeflow Trainer 2.2 or later" in said


def test_a_job_of_volcano_starts_as_many_ranks_as_a_pod_has(tmp_path: Path) -> None:
    job = written(on_gpu(), tmp_path, "--world-size", "16", "--job", "volcano")
    tasks = {task["name"]: task["replicas"] for task in job["spec"]["tasks"]}
    assert (tasks, job["spec"]["minAvailable"]) == ({"master": 1, "worker": 1}, 2)
    (container,) = job["spec"]["tasks"][1]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == ASKED
    assert container["command"][2].startswith("exec torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=8")
    assert container["command"][2].endswith("train.py --name 'a b'")


def test_a_plain_job_on_cpus_asks_for_the_budget(tmp_path: Path) -> None:
    """AND have a disk for their first step, and are allowed what the plan was."""
    plan = a_plan(AllocatorReuse(policy="tensor-heap", limit_bytes=9), Autocast(dtype="bfloat16"))
    plain = PeakBytes(allocated_bytes=3 * GIB, process_bytes=4 * GIB)
    plan = replace(plan, forecast=replace(plan.forecast, budget_bytes=2 * GIB, plain_peak=plain))
    job = written(plan, tmp_path, "--world-size", "2", "--job", "job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    asked = {"memory": str((2 * 2 + 1) * GIB), "ephemeral-storage": str((2 * 3 + 1) * GIB)}
    assert container["resources"] == {"requests": asked | {"cpu": 2}, "limits": asked}
    start = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "memwall", "run"]
    own = ["--budget", str(2 * GIB), "--disk", "/memwall-scratch", "--allow", "precision"]
    assert container["command"] == [*start, *own, "train.py", "--name", "a b"]
    assert container["volumeMounts"][1] == {"name": "scratch", "mountPath": "/memwall-scratch"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--world-size", "12"), "--world-size 12 does not fill nodes of 8 ranks"),
        (("--world-size", "16", "--job", "job"), "a plain Job has one node, and this run has 2"),
        (("--disk", "/mnt"), "--to kubernetes has no place for --disk: each pod has a volume of its own"),
        (("--script", "train.py 'a"), """--script "train.py 'a": No closing quotation; expected SCRIPT ARGS"""),
        (("--script", " "), "--script is empty; expected SCRIPT ARGS"),
        (("--job", "pod"), "--job: 'pod' is not known; expected one of trainjob, volcano, job"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(on_gpu(), tmp_path, *options, status=2)
    assert said in capsys.readouterr().err


def test_a_job_needs_something_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu().save(str(tmp_path / "plan.json"))
    assert main(["export", str(tmp_path / "plan.json"), "--to", "kubernetes", "-o", str(tmp_path / "job.yaml")]) == 2
    assert "needs --image IMAGE and --script SCRIPT" in capsys.readouterr().err
