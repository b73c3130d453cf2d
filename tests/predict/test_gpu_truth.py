"""`make gpu-truth`, as far as a machine without a GPU goes: it refuses, and its order, tables and targets are right."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_truth() -> Iterator[ModuleType]:
    """The benchmark's module; scripts of its folder import each other by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("gpu_truth")
    sys.path.remove(str(ROOT / "benchmarks"))


def row(predicted_bytes: int, measured_bytes: int, margin_bytes: int = 0) -> dict[str, Any]:
    names = ("allocated_bytes", "reserved_bytes", "process_bytes")
    predicted = dict.fromkeys(names, predicted_bytes) | {"margin_bytes": margin_bytes}
    return {"predicted": predicted, "measured": dict.fromkeys(names, measured_bytes)}


def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_truth.py", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nothing was measured, nothing written" in done.stderr
    assert not output.exists()


def test_each_case_comes_once_and_every_family_comes_early(gpu_truth: ModuleType) -> None:
    found = list(gpu_truth.cases())
    assert len(set(found)) == len(found) == 12 * 6 * 3
    early = found[:24]
    assert {family for family, _, _ in early} == set(gpu_truth.FAMILIES)
    assert {precision for _, precision, _ in early} == set(gpu_truth.PRECISIONS)
    assert {optimizer for _, _, optimizer in early} == set(gpu_truth.OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce GTX 970", None),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(gpu_truth: ModuleType, name: str, entry: str | None) -> None:
    from memwall.errors import UsageError

    if entry is None:
        with pytest.raises(UsageError, match="--device"):
            gpu_truth.hardware_here(name)
    else:
        assert gpu_truth.hardware_here(name).name == entry


def test_targets_that_are_missed_are_named(gpu_truth: ModuleType) -> None:
    right = gpu_truth.tables([row(1000, 1000)] * 20)
    assert gpu_truth.missed(right) == []
    short = gpu_truth.tables([row(900, 1000, margin_bytes=50)] * 20)
    assert short["false_fits_share"] == 1.0
    assert [text.split(" >")[0] for text in gpu_truth.missed(short)] == [
        "allocated median 10.0%",
        "reserved median 10.0%",
        "reserved p95 10.0%",
        "false fits 100.0%",
    ]
    covered = gpu_truth.tables([row(900, 1000, margin_bytes=100)] * 20)
    assert covered["false_fits_share"] == 0.0


def test_a_handful_of_rows_meets_no_target(gpu_truth: ModuleType) -> None:
    assert gpu_truth.missed(gpu_truth.tables([row(1000, 1000)] * 3)) == [
        "allocated: 3 rows are too few",
        "reserved: 3 rows are too few",
    ]
