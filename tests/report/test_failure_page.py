"""The page of a run out of memory shows commands that can be given, or none."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from plans import a_plan

from memwall.errors import OutOfMemoryError
from memwall.report.failure_page import failure_page

MIB = 1 << 20
SCRIPT = ("train.py", "--budget", "7", "run")


def commands(words: Sequence[str], *, is_launched: bool = False, is_committed: bool = False) -> tuple[str, list[str]]:
    """Returns the title above the ways to go on, and their commands."""
    error = OutOfMemoryError("out", phase="forward", asked_bytes=1, held_bytes=1, next_budget_bytes=100 * MIB)
    plan = a_plan()
    page = failure_page(
        error,
        words=words,
        script=SCRIPT,
        is_launched=is_launched,
        plan=replace(plan, forecast=replace(plan.forecast, smallest_feasible_budget_bytes=50 * MIB)),
        trace=None,
        peak_bytes=0,
        is_committed=is_committed,
    )
    (grid,) = [grid for grid in page.grids if grid.title.startswith("How to go on")]
    return grid.title, [str(row[2]) for row in grid.rows]


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--budget", "1GiB"),
        ("run", "--budget=1GiB"),
        ("run", "--plan", "plan.json"),
        ("run", "--plan=plan.json"),
    ],
)
def test_a_budget_takes_the_place_of_memwalls_own_and_of_a_plan(words: tuple[str, ...]) -> None:
    _, shown = commands(words)
    assert shown == [f"memwall run --budget {size}MiB train.py --budget 7 run" for size in (100, 50)]


def test_a_run_with_commits_is_resumed_and_a_given_plan_is_not_taken_again() -> None:
    first = "memwall run --resume --budget 1GiB train.py --budget 7 run"
    assert commands(("run", "--budget", "1GiB"), is_committed=True)[1][0] == first
    assert commands(("run", "--plan", "p"), is_committed=True)[1] == [
        f"memwall run --budget {size}MiB --resume train.py --budget 7 run" for size in (100, 50)
    ]


def test_under_a_launcher_the_words_are_those_after_its_own() -> None:
    title, shown = commands(("run", "--budget", "1GiB"), is_launched=True)
    assert title == "How to go on, after the launcher's own words"
    assert shown[0] == "-m memwall run --budget 100MiB train.py --budget 7 run"


def test_a_run_that_python_started_has_budgets_without_commands() -> None:
    assert commands((), is_committed=True)[1] == ["-", "-", "-"]
