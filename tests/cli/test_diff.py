"""`memwall diff`: two files of every kind, the status for CI, and what cannot be compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_history import MIB, frame

from memwall.cli.app import main

pytestmark = pytest.mark.usefixtures("folder")

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
LINE = frame("/home/me/train.py", 3, "step")
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


@pytest.mark.parametrize("name", ["t.trace", "plan.json", "run.json", "s8.pickle"])
def test_a_file_does_not_differ_from_itself(name: str, made: Path, shown: Shown) -> None:
    found = json.loads(shown(0, made / name, made / name, "--fail-over", "0", "--json"))
    assert found["schema"] == "memwall.diff/1"
    assert found["exceeds"] is False
    assert found["notes"] == []
    assert found["changes"][0]["group"] == "peak"
    assert {change["change_bytes"] for change in found["changes"]} == {0}


def test_growth_beyond_the_limit_is_status_3(made: Path, shown: Shown) -> None:
    files = made / "s8.pickle", made / "s10.pickle"
    text = shown(3, *files, "--fail-over", "24.9")
    assert "✗ the peak grew by more than 24.9%: most in use 8.0 MiB -> 10.0 MiB (+25.0%)" in text.replace("\n", " ")
    assert "me/train.py:3 step   8.0 MiB   10.0 MiB   +2.0 MiB   +25.0%" in text
    assert shown(0, *files, "--fail-over", "25%").startswith("✓ no peak grew by more than 25%")
    assert shown(0, *files).startswith("· peak: most in use 8.0 MiB")
    assert shown(0, *reversed(files), "--fail-over", "0").startswith("✓")


def test_scripts_get_every_figure_of_the_tables(made: Path, shown: Shown) -> None:
    found = json.loads(shown(3, made / "s8.pickle", made / "s12.pickle", "--fail-over", "5", "--json"))
    assert found["exceeds"] is True
    in_use = {"group": "peak", "name": "most in use", "before_bytes": 8 * MIB, "after_bytes": 12 * MIB}
    assert found["changes"][0] == in_use | {"change_bytes": 4 * MIB, "change_percent": 50.0}
    assert {change["name"]: change["change_bytes"] for change in found["changes"]} == {
        "most in use": 4 * MIB,
        "most held": 0,
        "stranded when most was held": -4 * MIB,
        "in use at the end": 4 * MIB,
        "unknown": 4 * MIB,
        "me/train.py:3 step": 4 * MIB,
    }


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
