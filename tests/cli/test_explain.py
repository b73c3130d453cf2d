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
    default, bound = format_bytes(found["default_bytes"]), format_bytes(found["lower_bound_bytes"])
    saved = format_bytes(found["replayed_bytes"] - found["best_bytes"])
    assert main(["explain", str(snapshot)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = shown.index("Allocator settings")
    assert shown[start + 3 : start + 12] == [
        f"as recorded {recorded}",
        f"recorded settings, simulated again {recorded} 0.0%",
        f"default settings, L2 what-if {default}",
        f"best settings, L2 what-if {best} saves {saved}",
        f"lower bound: most in use at once {bound}",
        "",
        "PYTORCH_CUDA_ALLOC_CONF",
        "─" * 61,
        "recorded expandable_segments:False,large_segment_size_mb:20",
    ]
    assert shown[start + 12] == f"best {found['best_settings']}"


def test_where_the_start_is_missing_what_was_held_is_taken_as_it_lay(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = pickle.loads(snapshot.read_bytes())
    del raw["device_traces"][0][:20]
    snapshot.write_bytes(pickle.dumps(raw))
    assert main(["explain", str(snapshot)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Allocator settings" in shown
    assert "were held before the recording began; every setting is simulated from them as they lay" in shown


def test_the_release_that_wrote_a_snapshot_may_be_named(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A snapshot does not say it, and allocators differ."""
    assert main(["explain", str(snapshot), "--torch", "2.11.0", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    named = [device["settings"]["torch_version"]] if device["settings"] else device["notes"]
    assert any("2.11.0" in text for text in named)
    assert main(["explain", str(snapshot), "--torch", "mine"]) == 2
    assert "'mine' is not a torch version" in capsys.readouterr().err
    (snapshot.parent / "plan.json").write_text("{}")
    assert main(["explain", str(snapshot.parent / "plan.json"), "--torch", "2.11.0"]) == 2
    assert "--torch 2.11.0: only for a CUDA memory snapshot" in capsys.readouterr().err
