"""DLRover's tuning file: what an agent and the workers of a job find there before and after an export."""

import json
from pathlib import Path
from typing import Any

import pytest
from plans import a_plan

from memwall.cli.app import main
from memwall.integrations import TunedBatch, tuned_batch
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.recompute import Recompute

LOADER = {
    "version": 3,
    "dataloader_name": "train",
    "last_batch_size": 4,
    "batch_size": 16,
    "num_workers": 2,
    "pin_memory": True,
}
OPTIMIZER = {"version": 2, "optimizer_name": "adamw", "learning_rate": 0.001, "weight_decay": 0.01}
FILE: dict[str, Any] = {"dataloader": LOADER, "optimizer": OPTIMIZER, "restart": False}
"""As DLRover's agent writes it, with values for every key."""


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that an agent names to its workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLROVER_PARAL_CONFIG_PATH", str(tmp_path / "tuning.json"))
    a_plan(Accumulate(micro_batch=2, num_micro_batches=4), Recompute(block="h.0")).save("plan.json")
    return tmp_path / "tuning.json"


def export(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["export", "plan.json", "--to", "dlrover", "-o", "tuning.json", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_micro_batch_is_written_with_the_version_of_its_section_raised(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.write_text(json.dumps(FILE))
    found = export(capsys)
    loader = LOADER | {"version": 4, "last_batch_size": 16, "batch_size": 2}
    assert json.loads(tuning.read_text()) == FILE | {"dataloader": loader}
    assert [action["kind"] for action in found["kept_by_memwall"]] == ["recompute"]
    assert any("4 of these batches make a step" in remark for remark in found["remarks"])
    assert [path.name for path in tuning.parent.iterdir() if "tuning" in path.name] == ["tuning.json"]


def test_a_file_that_is_not_there_is_made_with_both_sections(tuning: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(capsys)
    written = json.loads(tuning.read_text())
    assert (set(written["dataloader"]), set(written["optimizer"])) == (set(LOADER), set(OPTIMIZER))
    assert (written["dataloader"]["version"], written["dataloader"]["batch_size"], written["restart"]) == (1, 2, False)


@pytest.mark.parametrize("missing", ["dataloader", "optimizer"])
def test_a_section_that_is_missing_is_added(missing: str, tuning: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning.write_text(json.dumps({name: section for name, section in FILE.items() if name != missing}))
    export(capsys)
    written = json.loads(tuning.read_text())
    assert (set(written["dataloader"]), set(written["optimizer"])) == (set(LOADER), set(OPTIMIZER))
    assert tuned_batch() == TunedBatch(batch_size=2, version=1 if missing == "dataloader" else 4)


def test_a_key_on_which_the_agent_would_fail_is_left_out(tuning: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning.write_text(json.dumps(FILE | {"dataloader": LOADER | {"prefetch_factor": 2}, "note": "kept"}))
    found = export(capsys)
    written = json.loads(tuning.read_text())
    assert (set(written["dataloader"]), written["note"]) == (set(LOADER), "kept")
    assert any("dataloader.prefetch_factor" in remark for remark in found["remarks"])


def test_a_file_that_is_cut_short_is_not_written_over(tuning: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its version is unknown: a lower one than workers have seen would be passed over without a word."""
    cut = json.dumps(FILE)[:40]
    tuning.write_text(cut)
    assert main(["export", "plan.json", "--to", "dlrover", "-o", "tuning.json"]) != 0
    assert "cut short" in capsys.readouterr().err
    assert tuning.read_text() == cut


def test_a_reader_is_told_a_batch_once(tuning: Path) -> None:
    tuning.write_text(json.dumps(FILE))
    assert tuned_batch() == TunedBatch(batch_size=16, version=3)
    assert tuned_batch(tuning, seen_version=2) == TunedBatch(batch_size=16, version=3)
    assert tuned_batch(seen_version=3) is None


@pytest.mark.parametrize(
    "content",
    [None, "", json.dumps(FILE)[:40], "{}", json.dumps({"optimizer": OPTIMIZER}), '{"dataloader": {"version": 9}}'],
)
def test_what_is_missing_or_cut_short_has_nothing_new(content: str | None, tuning: Path) -> None:
    if content is not None:
        tuning.write_text(content)
    assert tuned_batch() is None


def test_a_key_that_is_not_known_is_passed_over_by_a_reader(tuning: Path) -> None:
    tuning.write_text(json.dumps(FILE | {"dataloader": LOADER | {"prefetch_factor": 2}}))
    assert tuned_batch() == TunedBatch(batch_size=16, version=3)


@pytest.mark.parametrize("content", ["[]", '{"dataloader": {"version": "new"}}', '{"dataloader": 3}'])
def test_another_file_is_refused(content: str, tuning: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuning.write_text(content)
    assert main(["export", "plan.json", "--to", "dlrover", "-o", "tuning.json"]) != 0
    assert "is no tuning file of DLRover" in capsys.readouterr().err
    assert tuning.read_text() == content
