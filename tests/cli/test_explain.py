"""`memwall explain snapshot.pickle` says which allocator settings would have saved how much, or why it cannot."""

import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cuda_history import simulated_snapshot, varying_requests
from figures import untagged, without_unit
from msgspec.structs import replace

from memwall.cli.app import main
from memwall.machine import hardware
from memwall.machine.hardware import hardware_named
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
        f"recorded settings, L1 re-simulation {recorded} 0.0%",
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


@pytest.mark.slow
def test_a_run_is_asked_whether_it_would_fit_on_a_smaller_card(
    snapshot: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status and outcome change at the edge, which is an interval because the context is one."""
    peak_bytes = simulated_snapshot(varying_requests())[1].reserved_peak_bytes

    def asked(usable_bytes: int, context_bytes: tuple[int, int]) -> tuple[int, dict[str, Any]]:
        small = replace(hardware_named("t4"), usable_bytes=usable_bytes, context_bytes=context_bytes)
        monkeypatch.setattr(hardware, "hardware_named", lambda name: small)
        status = main(["explain", str(snapshot), "--device", "t4", "--json"])
        return status, json.loads(capsys.readouterr().out)["fits"][0]

    def outcome(usable_bytes: int, context_bytes: tuple[int, int] = (100, 200)) -> tuple[int, str, bool]:
        status, fit = asked(usable_bytes, context_bytes)
        assert fit["level"] == "L3 edge of memory"
        assert fit["capacity_bytes"] == [usable_bytes - context_bytes[1], usable_bytes - context_bytes[0]]
        return status, fit["outcome"], fit["num_retries"] > 0

    assert outcome(peak_bytes + 200) == (0, "fits", False)
    assert outcome(peak_bytes + 199) == (0, "fits, giving back cached memory", True)
    assert outcome(peak_bytes // 4) == (3, "does not fit", True)
    assert outcome(peak_bytes + 200, (100, peak_bytes)) == (4, "fits only with the smallest context", True)
    monkeypatch.undo()
    assert main(["explain", str(snapshot), "--device", "a100-40gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (without_unit(found), untagged(found)) == ([], [])
    assert main(["explain", str(snapshot), "--device", "a100-40gb"]) == 0
    shown = capsys.readouterr().out
    assert "On a100-40gb, L3 edge of memory: " in shown


def test_where_it_cannot_be_told_whether_a_run_would_fit_the_reason_is_the_error(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = pickle.loads(snapshot.read_bytes())
    for event in raw["device_traces"][0]:
        event["pool_id"] = (0, 1)
    snapshot.write_bytes(pickle.dumps(raw))
    assert main(["explain", str(snapshot), "--device", "l4"]) == 2
    assert "fits on l4: no other allocator settings were compared: private pools" in capsys.readouterr().err
    (snapshot.parent / "plan.json").write_text("{}")
    assert main(["explain", str(snapshot.parent / "plan.json"), "--device", "l4"]) == 2
    assert "--device l4: only for a CUDA memory snapshot" in capsys.readouterr().err
