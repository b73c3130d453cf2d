"""The GPU day, whole and tiny, on the phantom device: on the first real card nothing is to break."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from figures import untagged, without_unit

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(seconds=70)
@pytest.mark.timeout(400)
@pytest.mark.phantom(order="timed", numbers=False)
def test_every_part_runs_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_day.py", "--tiny", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    day = json.loads((tmp_path / "gpu_day.json").read_text())
    assert {name: part["outcome"] for name, part in day["parts"].items()} == dict.fromkeys(
        ("truth", "kernels", "budgets", "link", "phantom"), "done"
    )
    results = {name: part["result"] for name, part in day["parts"].items()}
    assert {day["tag"], *(result["tag"] for result in results.values())} == {"simulated"}
    assert all(result["device"].startswith("phantom NVIDIA H100") for result in results.values())
    assert (without_unit(day), untagged(day)) == ([], [])
    (row,) = results["truth"]["rows"]
    assert row["predicted"]["allocated_bytes"] == pytest.approx(row["measured"]["allocated_bytes"], rel=0.01)
    assert [each["difference"] for each in results["truth"]["histories"]["l1"]] == [None, None]
    ours = [row for row in results["kernels"]["rows"] if row["provider"].startswith("memwall")]
    assert all(row["error_ratio"] <= 2 for row in ours)
    assert {row["op"] for row in ours} == {"rms_norm", "adamw"}
    (run,) = results["budgets"]["rows"]
    assert (run["exceeded_bytes"], run["is_digest_equal"]) == (0, True)
    assert results["link"]["offload"]["is_gradient_equal"]
    assert [each["difference"] for each in results["phantom"]["histories"]] == [None]
    assert [each["worst_error"] for each in results["phantom"]["zoo"]] == [0]
    page = (tmp_path / "gpu_day.html").read_text()
    assert "simulated: all 5 parts are done, no goal is judged" in page
    assert "://" not in page
