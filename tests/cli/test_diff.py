"""`memwall diff`: two files of every kind, the status for CI, the page, and what cannot be compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from memwall.cli.app import main
from memwall.trace.file import load_trace, save_trace

pytestmark = pytest.mark.usefixtures("folder")

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs `diff`, which must end with a status; returns what it printed."""

    def run(status: int, *arguments: str | Path) -> str:
        capsys.readouterr()
        assert main(["diff", *map(str, arguments)]) == status
        out, err = capsys.readouterr()
        assert not (out and err)
        return out or err

    return run


@pytest.mark.parametrize("name", ["t.trace", "plan.json", "run.json"])
def test_a_file_does_not_differ_from_itself(name: str, made: Path, shown: Shown) -> None:
    found = json.loads(shown(0, made / name, made / name, "--fail-over", "0", "--json"))
    assert found["schema"] == "memwall.diff/1"
    assert found["exceeds"] is False
    assert found["notes"] == []
    assert found["changes"][0]["group"] == "peak"
    assert {change["change_bytes"] for change in found["changes"]} == {0}


@pytest.fixture
def grown(made: Path, folder: Path) -> Path:
    """The trace of the script with every tensor larger by a quarter."""
    trace = load_trace(made / "t.trace")
    steps = tuple(
        replace(step, storages=tuple(replace(found, nbytes=found.nbytes * 5 // 4) for found in step.storages))
        for step in trace.steps
    )
    save_trace(replace(trace, steps=steps), folder / "grown.trace")
    return folder / "grown.trace"


def test_growth_beyond_the_limit_is_status_3(made: Path, grown: Path, shown: Shown) -> None:
    files = made / "t.trace", grown
    assert shown(3, *files, "--fail-over", "24.9").startswith("✗ the peak grew by more than 24.9%: live tensors ")
    assert shown(0, *files, "--fail-over", "25.1%").startswith("✓ no peak grew by more than 25.1%")
    assert shown(0, *files).startswith("· peak: live tensors ")
    assert shown(0, *reversed(files), "--fail-over", "0").startswith("✓")


def test_scripts_get_every_figure_of_the_tables(made: Path, grown: Path, shown: Shown) -> None:
    found = json.loads(shown(3, made / "t.trace", grown, "--fail-over", "5", "--json"))
    assert found["exceeds"] is True
    for change in found["changes"]:
        assert change["change_bytes"] == change["after_bytes"] - change["before_bytes"]
    peak = found["changes"][0]
    assert (peak["group"], peak["name"]) == ("peak", "live tensors")
    assert peak["change_percent"] == pytest.approx(25, abs=0.1)
    groups = {change["group"] for change in found["changes"]}
    assert groups == {"peak", "quantity", "phase", "category", "module", "line"}


def test_files_of_different_kinds_are_refused(made: Path, shown: Shown) -> None:
    assert shown(2, made / "t.trace", made / "plan.json").startswith(
        f"memwall: {made}/t.trace is a trace, {made}/plan.json is a plan; expected two files of one kind: two traces ("
    )
    assert shown(2, made / "plan.json", made / "run.json").endswith("; memwall verify compares a plan with its run\n")


@pytest.mark.parametrize("given", ["-1", "x", "nan", "inf", "5%%"])
def test_a_limit_that_is_no_percentage_is_refused(given: str, made: Path, shown: Shown) -> None:
    message = f"memwall: --fail-over: '{given}' is no percentage; expected a number such as 5, 2.5 or 0\n"
    assert shown(2, made / "t.trace", made / "t.trace", f"--fail-over={given}") == message


def test_a_file_that_is_missing_or_of_no_kind_is_named(made: Path, shown: Shown, folder: Path) -> None:
    assert shown(2, made / "t.trace", "no").startswith("memwall: there is no file no; expected two traces (")
    (folder / "x").write_text("hello")
    assert shown(2, "x", made / "t.trace").startswith("memwall: x is nothing that memwall can report on; expected two")
