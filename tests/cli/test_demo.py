"""`memwall demo` on a model small enough for a test: both runs, the same weights, the page."""

import json
from pathlib import Path

import pytest

from memwall.cli.demo_run import run_demo

SMALL = ("--width", "64", "--layers", "2", "--tokens", "64", "--batch", "2", "--steps", "3")


@pytest.mark.exhaustive  # make demo
def test_the_demo_trains_twice_to_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN a budget with room WHEN the demo runs THEN both runs end in the same weights, and a page shows them."""
    assert run_demo(budget="4GiB", out=tmp_path, as_json=True, script_arguments=SMALL) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["weights_equal"]
    assert result["losses_equal"]
    assert 0 < result["measured_peak_bytes"] < result["budget_bytes"] == 4 << 30
    assert "<html" in (tmp_path / "report.html").read_text()[:200]
    assert {path.name for path in tmp_path.iterdir()} >= {"demo.trace", "plan.json", "run.json", "report.html"}


@pytest.mark.slow(seconds=40)
@pytest.mark.phantom(context_bytes=64 << 20)
def test_the_demo_measures_the_device_where_torch_sees_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_demo(budget="1GiB", out=tmp_path, as_json=True, script_arguments=SMALL) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["weights_equal"]
    assert result["tag"] == result["run"]["measured"]["tag"] == "gpu-measured"
    # Context and the segments of a small model: resident memory of a process with torch's CUDA build is far more.
    assert 64 << 20 < result["measured_peak_bytes"] <= result["free_peak_bytes"] + (64 << 20) < 300 << 20
