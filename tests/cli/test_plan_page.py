"""`memwall plan --report`, and a run's page, draw a step with and without the plan, and when blocks are treated."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwall.cli.app import main
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.predict.curve import peak_of
from memwall.report.plan_page import schedule_grid
from memwall.trace.file import load_trace
from memwall.trace.steps import steady_step

pytestmark = [pytest.mark.usefixtures("folder"), pytest.mark.requires("plotly", "jinja2")]

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
MIB = 1 << 20


def charts(page: str) -> list[dict[str, Any]]:
    """Returns what is handed to plotly."""
    found = re.search(r"const charts = (\[.*?\]);\nconst places", page, re.DOTALL)
    assert found is not None
    return list(json.loads(found.group(1)))


def highest_mib(chart: dict[str, Any]) -> float:
    return float(next(trace for trace in chart["data"] if trace["name"] == "peak")["y"][0])


@pytest.fixture
def tight(made: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Plan]:
    """A trace, and a plan for a little more than the least that it can do with."""
    smallest_bytes = Plan.load(made / "plan.json").forecast.smallest_feasible_budget_bytes
    assert smallest_bytes is not None
    budget = str(smallest_bytes + MIB)
    trace = made / "t.trace"
    assert main(["plan", str(trace), "--budget", budget, "-o", "plan.json", "--report", "plan.html"]) == 0
    assert "The step with and without the plan: plan.html" in capsys.readouterr().out
    return trace, Plan.load("plan.json")


def test_a_plans_page_draws_both_steps_and_says_when_each_block_is_treated(tight: tuple[Path, Plan]) -> None:
    trace, plan = load_trace(tight[0]), tight[1]
    page = Path("plan.html").read_text()
    steps = (steady_step(trace), step_under_plan(trace, plan))
    drawn = [highest_mib(chart) for chart in charts(page)]
    foreseen = [(peak_of(trace, step).live_bytes + trace.base_bytes) / MIB for step in steps]
    assert drawn == pytest.approx(foreseen, abs=0.01)
    assert drawn[1] < drawn[0]
    assert page.index("free run") < page.index("under the plan") < page.index("Schedule, by the clock of a step")


def test_each_block_has_a_row_with_its_times_and_its_action(tight: tuple[Path, Plan]) -> None:
    trace, plan = load_trace(tight[0]), tight[1]
    rows = schedule_grid(trace, plan).rows
    treated = {action.block for action in plan.actions if getattr(action, "block", None) is not None}
    assert {row[0] for row in rows if row[2] != "kept"} == treated != set()
    assert [row[0] for row in rows] == [*(f"blocks.{number}" for number in range(4)), "norm", "head"]
    assert all(re.fullmatch(r"\S+ \w+ to \S+ \w+", row[column]) for row in rows for column in (1, 4))


@pytest.mark.slow
def test_a_runs_page_draws_the_plan_that_it_ran_under() -> None:
    assert main(["run", "--budget", "8GiB", "--report", "run.html", PLAIN]) == 0
    page = Path("run.html").read_text()
    assert len(charts(page)) == 2
    assert "Prediction and measurement" in page
    assert "Actions" in page


def test_a_page_with_another_ending_is_refused(made: Path, refused: Callable[..., str]) -> None:
    message = refused("plan", made / "t.trace", "--budget", "8GiB", "--report", "plan.json")
    assert message == "--report plan.json: a plan's page is for a browser; expected a name that ends with .html"
    assert list(Path().iterdir()) == []
