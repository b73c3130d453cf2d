"""The table of scripts of many kinds: what counts as held, and the page that shows it."""

import json
from pathlib import Path
from typing import Any

import compat
import numpy
import pytest

MIB = 1 << 20


def run(status: int, *, held: bool = False, equal: bool = True, peak: int = 90) -> dict[str, Any]:
    return {"budget_bytes": 100 * MIB, "exit_status": status, "peak_bytes": peak * MIB, "held": held, "equal": equal}


HELD = run(0, held=True)


@pytest.mark.parametrize(
    ("row", "is_kept"),
    [
        ({"share": HELD, "told": HELD}, True),
        ({"share": HELD}, True),
        ({"share": run(3), "told": HELD}, True),
        ({"share": run(3)}, False),
        ({"share": HELD, "told": run(3)}, False),
        ({"share": HELD, "told": run(5)}, False),
        ({"share": HELD, "told": run(0, held=True, equal=False)}, False),
        ({"share": run(0, peak=101), "told": HELD}, False),
        ({"share": run(-9), "told": HELD}, False),
    ],
)
def test_what_counts_as_kept(row: dict[str, Any], is_kept: bool) -> None:
    assert compat.is_kept(row) == is_kept


def test_what_was_not_held_is_said_in_its_cell() -> None:
    assert compat.cell(HELD) == "100: 90, held"
    assert compat.cell(run(3)) == "100: refused"
    assert compat.cell(run(5, peak=110)) == "100: 110, **not held** (status 5)"
    assert compat.cell(run(0, held=True, equal=False)) == "100: 90, held, **other bits**"
    assert compat.cell(None) == "none told"
    assert compat.cell(HELD | {"num_refusals": 2}) == "100: 90, held after 2 refusals"


def test_refusals_are_followed_until_one_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GIVEN a script whose longest batch comes late WHEN its first number is refused THEN the second one counts."""
    refusals = {"64MiB": "200 MiB", "200 MiB": "300 MiB"}
    budgets = []

    def observed(script: Path, *, folder: Path, budget: str | None = None) -> compat.Observed:
        budgets.append(budget)
        told = refusals.get(budget or "")
        return compat.Observed(
            status=0 if told is None else 3,
            peak_bytes=1000 * MIB if budget is None else 290 * MIB,
            seconds=1.0,
            output="weights 5\n",
            errors="" if told is None else f"cannot be met: the smallest feasible one is {told}, 9.0 MiB more",
        )

    monkeypatch.setattr(compat, "observed", observed)
    row = compat.measured(tmp_path / "script.py")
    assert budgets == [None, "700MiB", "64MiB", "200 MiB", "300 MiB"]
    assert (row["told"]["budget_bytes"], row["told"]["num_refusals"], compat.is_kept(row)) == (300 * MIB, 2, True)


def test_a_row_that_the_time_limit_ends_is_said_and_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def observed(script: Path, **_: Any) -> compat.Observed:
        raise compat.TimeLimitError(f"{script.name} was ended by the time limit after 900 s")

    before = compat.OUTPUT.read_text()
    monkeypatch.setattr(compat, "observed", observed)
    monkeypatch.setattr("sys.argv", ["compat.py", "small"])
    assert compat.main() == 1
    assert "small: no new row: small.py was ended by the time limit after 900 s" in capsys.readouterr().out
    assert compat.OUTPUT.read_text() == before


def test_what_a_script_needs_and_is_not_installed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json\nimport torch\nimport no_such.part\nfrom numpy.linalg import norm\n")
    assert compat.packages(script) == {"no-such": None, "numpy": numpy.__version__}
    assert compat.missing_packages(script) == ["no-such"]


def test_the_page_is_what_was_measured() -> None:
    assert compat.PAGE.read_text() == compat.page(json.loads(compat.OUTPUT.read_text())["scripts"])
