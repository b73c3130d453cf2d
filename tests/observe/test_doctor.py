"""`memwall doctor`: the facts of a machine as text and as an object, and what each defect is told."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from memwall import patches
from memwall.cli.app import main
from memwall.errors import StoreError
from memwall.machine.limits import CgroupLimit
from memwall.machine.tiers import Tier
from memwall.observe import doctor as subject
from memwall.observe.doctor import Device, Inspection, Library, inspect_machine, warnings_of

GIB = 1 << 30
HEALTHY = Inspection(
    tag="cpu-measured",
    devices=(Device(name="cpu", description="Fast CPU", total_bytes=8 * GIB, free_bytes=5 * GIB),),
    num_cores=4,
    num_threads=4,
    ram_total_bytes=16 * GIB,
    ram_available_bytes=5 * GIB,
    memory_limit_bytes=8 * GIB,
    cgroup=CgroupLimit(limit_bytes=8 * GIB, path="/sys/fs/cgroup/a/memory.max", version=2),
    swap_total_bytes=0,
    swap_used_bytes=0,
    malloc="glibc 2.36",
    heap_problem="",
    shm_total_bytes=8 * GIB,
    disk=Tier(
        name="disk",
        directory="/data",
        free_bytes=100 * GIB,
        write_bytes_per_second=GIB,
        read_bytes_per_second=2 * GIB,
    ),
    disk_problem="",
    libraries=(
        Library(name="torch", version="2.13.0+cpu", extra=""),
        Library(name="triton", version=None, extra="kernels"),
    ),
    foreign_memwall=None,
)

LIBRARIES = "torch         2.13.0+cpu"


def show(machine: Inspection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr(subject, "inspect_machine", lambda directory: machine)
    monkeypatch.setattr(patches, "_active", {})  # as in a process of its own
    assert main(["doctor"]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_table_of_a_healthy_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(HEALTHY, monkeypatch, capsys) == [
        "cpu           Fast CPU: 8.00 GiB, 5.00 GiB free",
        "cores         4, torch computes with 4 threads",
        "memory        16.00 GiB, 5.00 GiB available",
        "memory limit  8.00 GiB (cgroup v2, /sys/fs/cgroup/a/memory.max)",
        "swap          none",
        "malloc        glibc 2.36",
        "tensor heap   available",
        "/dev/shm      8.00 GiB",
        "disk          /data: 100.00 GiB free, write 1.00 GiB/s, read 2.00 GiB/s",
        "torch         2.13.0+cpu",
        "triton        not installed (pip install 'torch-memwall[kernels]')",
        "",
        "patches in effect: none",
        "",
        "nothing to mend",
    ]


def test_table_ends_with_warnings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ailing = replace(HEALTHY, num_threads=64, disk=None, disk_problem="/tmp is in RAM", cgroup=None)
    lines = show(ailing, monkeypatch, capsys)
    assert "memory limit  none" in lines
    assert "disk          not measured" in lines
    assert lines[-6:] == [
        "",
        "warning: torch computes with 64 threads on 4 cores",
        "  -> set OMP_NUM_THREADS=4",
        "",
        "warning: /tmp is in RAM",
        "  -> memwall doctor --disk DIR, a folder on a real disk",
    ]


@pytest.mark.parametrize(
    ("change", "found", "advice"),
    [
        (
            {"foreign_memwall": "0.6.1"},
            "the unrelated distribution memwall 0.6.1 is installed: same import name, same command",
            "pip uninstall memwall torch-memwall && pip install torch-memwall",
        ),
        (
            {"libraries": (Library(name="highspy", version=None, extra=""),)},
            "highspy is not installed, and memwall needs it",
            "pip install highspy",
        ),
        (
            {"libraries": (Library(name="torch", version="2.9.1+cu128", extra=""),)},
            "torch 2.9.1+cu128 is older than 2.11, the oldest that is tested",
            "pip install --upgrade torch",
        ),
        (
            {"swap_total_bytes": 2 * GIB},
            "swap of 2.00 GiB is on: a run over its memory gets slow instead of failing",
            "swapoff -a while measuring, or cap the run's cgroup without swap",
        ),
        (
            {"malloc": "jemalloc"},
            "malloc is jemalloc: the forecast of the peak without a plan models glibc's only",
            "run without LD_PRELOAD of another malloc to compare with it",
        ),
        (
            {"heap_problem": "the tensor heap needs Linux; this is darwin"},
            "no tensor heap: the tensor heap needs Linux; this is darwin",
            "install a C compiler and run pip install --force-reinstall --no-deps torch-memwall; without the heap "
            "plans on a CPU count what malloc keeps of freed tensors",
        ),
        (
            {"shm_total_bytes": 64 << 20},
            "/dev/shm holds only 64.0 MiB: DataLoader workers can fail on it",
            "start the container with --shm-size=1g, or --ipc=host",
        ),
        (
            {"allocator_findings": ("max_split_size_mb:8 is too small",)},
            "max_split_size_mb:8 is too small",
            "memwall estimate and memwall plan --device name settings that were simulated",
        ),
    ],
)
def test_each_defect_is_named_with_advice(change: dict[str, object], found: str, advice: str) -> None:
    (warning,) = warnings_of(replace(HEALTHY, **change))
    assert (warning.found, warning.advice) == (found, advice)


def test_healthy_machine_has_no_warnings() -> None:
    assert warnings_of(HEALTHY) == ()
    assert warnings_of(replace(HEALTHY, shm_total_bytes=None)) == ()


def test_preloaded_malloc_is_recognised(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n")
    assert subject._malloc_name(maps) == "jemalloc"


def test_foreign_distribution_is_found_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memwall-0.6.1.dist-info").mkdir()
    (tmp_path / "memwall-0.6.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: memwall\nVersion: 0.6.1\n")
    assert subject._version_of("memwall") is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert subject._version_of("memwall") == "0.6.1"


def test_this_machine_as_an_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(patches, "_active", {})  # as in a process of its own
    assert main(["doctor", "--json", "--disk", str(Path(__file__).parent)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == "memwall.doctor/1"
    found = shown["machine"]
    assert [device["name"] for device in found["devices"]][-1] == "cpu"
    assert 0 < found["ram_available_bytes"] <= found["ram_total_bytes"]
    assert found["memory_limit_bytes"] <= found["ram_total_bytes"]
    assert found["disk"]["write_bytes_per_second"] > 0
    assert found["disk"]["read_bytes_per_second"] > 0
    assert found["libraries"][0]["name"] == "torch"
    assert all(change["permanent"] for change in shown["patches"])


def test_what_memwall_has_changed_in_this_process_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject, "inspect_machine", lambda directory: HEALTHY)
    monkeypatch.setattr(patches, "_active", {})
    with patches.Patches("holds a budget") as group:
        group.add("setting", "malloc's thresholds", lambda: None)
        assert main(["doctor"]) == 0
    assert "patches in effect:\n  malloc's thresholds (setting): holds a budget\n" in capsys.readouterr().out


def test_dangerous_allocator_settings_are_found_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:128")
    (finding,) = inspect_machine(Path(__file__).parent).allocator_findings
    assert "lets reserved memory grow without bound (pytorch 123548)" in finding


def test_default_directory_that_is_unsuitable_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise StoreError("name one with --disk DIR")

    monkeypatch.setattr(subject, "default_directory", refuse)
    found = inspect_machine()
    assert found.disk is None
    assert "name one with --disk DIR" in [warning.found for warning in warnings_of(found)]
