"""`make gpu-day`, without a GPU: a part that fails, hangs or has no time stops no other, and what stands is kept."""

import json
from pathlib import Path
from typing import Any

import gpu_day
import pytest
from gpu_day import Part, earlier_parts, spend_day
from gpu_day_page import GRIDS, day_page

from memwall.report.html import page_html

PROGRAM = """
import json, sys, time
output = sys.argv[sys.argv.index("--output") + 1]
result = {{"failures": {failures!r}, "missed": {missed!r}, "not_reached": {left!r}, "argv": sys.argv[1:]}}
{before}
open(output, "w").write(json.dumps(result))
{after}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a day whose parts are small programs, and whose page has no tables of theirs."""
    monkeypatch.setattr(gpu_day, "HERE", tmp_path)
    for name in GRIDS:
        monkeypatch.setitem(GRIDS, name, lambda result: [])
    (tmp_path / "out" / "parts").mkdir(parents=True)
    return tmp_path / "out"


def part(folder: Path, name: str, *, minutes: float = 1.0, **said: Any) -> Part:
    words = {"failures": [], "missed": [], "left": [], "before": "", "after": "", **said}
    (folder.parent / f"{name}.py").write_text(PROGRAM.format(**words))
    return Part(name, name.capitalize(), f"{name}.py", minutes)


def day_of(**known: Any) -> dict[str, Any]:
    facts = {"schema": "s", "commit": "c" * 40, "device": "d", "versions": {"torch": "2"}, "tag": "gpu-measured"}
    return {**facts, "is_tiny": False, "has_uncommitted_changes": False, "parts": {}, **known}


def spend(folder: Path, day: dict[str, Any], *parts: Part, minutes: float = 30.0) -> dict[str, str]:
    spend_day(day, parts, folder / "parts", minutes, is_tiny=False)
    return {name: found["outcome"] for name, found in day["parts"].items()}


def test_what_fails_or_hangs_stops_nothing_and_is_named(folder: Path) -> None:
    day = day_of()
    outcomes = spend(
        folder,
        day,
        part(folder, "truth", before="raise SystemExit('no such driver')"),
        part(folder, "kernels", after="time.sleep(60)", minutes=0.02),
        part(folder, "budgets", failures=["weights differ"], after="sys.exit(1)"),
        part(folder, "link", missed=["slow"], after="sys.exit(1)"),
    )
    assert outcomes == {"truth": "broken", "kernels": "out of time", "budgets": "failed", "link": "done"}
    assert "no such driver" in day["parts"]["truth"]["failures"][0]
    assert "was ended" in day["parts"]["kernels"]["failures"][0]
    assert day["parts"]["kernels"]["result"]["argv"]  # what it had written is kept
    assert json.loads((folder / "gpu_day.json").read_text()) == day
    page = (folder / "gpu_day.html").read_text()
    assert "3 failures, 1 missed goals" in page
    assert "no such driver" in page


def test_a_second_call_does_what_failed_and_what_was_not_reached(folder: Path) -> None:
    day = day_of()
    parts = [part(folder, "truth"), part(folder, "kernels", before="1 / 0"), part(folder, "link", left=["x"])]
    spend(folder, day, *parts)
    kept = earlier_parts(folder / "gpu_day.json", day_of())
    for name, found in kept.items():
        found["seconds"] = -1.0 if name == "truth" else found["seconds"]
    again = day_of(parts=kept)
    part(folder, "kernels")
    assert spend(folder, again, *parts) == {"truth": "done", "kernels": "done", "link": "done"}
    assert again["parts"]["truth"]["seconds"] == -1.0
    assert again["parts"]["link"]["seconds"] > 0


@pytest.mark.parametrize("changed", [{"commit": "e"}, {"device": "e"}, {"is_tiny": True}, {"versions": {}}])
def test_nothing_is_kept_of_another_day(folder: Path, changed: dict[str, Any]) -> None:
    spend(folder, day_of(), part(folder, "link"))
    assert set(earlier_parts(folder / "gpu_day.json", day_of())) == {"link"}
    assert earlier_parts(folder / "gpu_day.json", day_of(**changed)) == {}
    assert earlier_parts(folder / "gpu_day.json", day_of(has_uncommitted_changes=True)) == {}


def test_parts_for_which_there_is_no_time_are_named(folder: Path) -> None:
    assert spend(folder, day_of(), part(folder, "truth"), minutes=0.5) == {"truth": "not begun"}


def test_a_page_that_breaks_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "link", lambda result: 1 / 0)
    day = day_of()
    assert spend(folder, day, part(folder, "link")) == {"link": "done"}
    assert day["page_failures"] == ["ZeroDivisionError: division by zero"]


def test_parts_have_a_minute_to_spare_and_a_table_each() -> None:
    assert sum(part.minutes for part in gpu_day.PARTS) <= 38
    assert [part.name for part in gpu_day.PARTS] == list(GRIDS)


def test_a_page_of_a_phantom_says_that_all_is_simulated() -> None:
    assert "Every figure on this page is simulated" in page_html(day_page(day_of(tag="simulated")))
    assert "simulated" not in page_html(day_page(day_of()))
