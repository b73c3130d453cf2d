"""`memwall explain snapshot.pickle` says which allocator settings would have saved how much, or why it cannot."""

import json
import pickle
from importlib.metadata import version
from pathlib import Path

import pytest
from cuda_history import simulated_snapshot, varying_requests

from memwall.cli.app import main
from memwall.units import format_bytes


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(simulated_snapshot(varying_requests())[0]))
    return tmp_path / "s.pickle"


def test_the_saving_and_the_complete_settings_are_shown(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(snapshot), "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    found = device["settings"]
    assert found["torch_version"] == version("torch")
    assert (
        found["recorded_bytes"] == found["replayed_bytes"] == device["reserved_peak"]["fragmentation"]["reserved_bytes"]
    )
    assert found["best_bytes"] < 0.8 * found["replayed_bytes"]
    recorded, best = format_bytes(found["recorded_bytes"]), format_bytes(found["best_bytes"])
    saved = format_bytes(found["replayed_bytes"] - found["best_bytes"])
    assert main(["explain", str(snapshot)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = shown.index("Allocator settings")
    assert shown[start + 3 : start + 10] == [
        f"as recorded {recorded}",
        f"recorded settings, simulated {recorded} 0.0%",
        f"best settings, simulated {best} saves {saved}",
        "",
        "PYTORCH_CUDA_ALLOC_CONF",
        "─" * 61,
        "recorded expandable_segments:False,large_segment_size_mb:20",
    ]
    assert shown[start + 10] == f"best {found['best_settings']}"


def test_where_the_start_is_missing_nothing_is_claimed(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = pickle.loads(snapshot.read_bytes())
    del raw["device_traces"][0][:20]
    snapshot.write_bytes(pickle.dumps(raw))
    assert main(["explain", str(snapshot)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Allocator settings" not in shown
    assert "were held before the recording began, and how they came to lie there is not known" in shown
