"""`memwall plan --curve` plans for other budgets in one call."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from memwall.cli.app import main
from memwall.planning.forecast import BudgetPoint, Forecast, PeakBytes
from memwall.report.budget_curve import budget_curve_view

MIB = 1 << 20


@pytest.mark.slow
def test_every_point_is_the_plan_for_its_budget(folder: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a trace WHEN its curve is asked for THEN each point is what a plan for that budget alone says, the smallest
    costs time, and the largest none.
    """
    trace = str(made / "t.trace")
    budget_bytes = json.loads((made / "plan.json").read_text())["forecast"]["smallest_feasible_budget_bytes"] + MIB
    capsys.readouterr()
    assert main(["plan", trace, "--budget", str(budget_bytes), "--curve", "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)
    curve = forecast["curve"]
    assert budget_bytes in [point["budget_bytes"] for point in curve]
    assert len(curve) >= 15
    seconds = [point["step_seconds"] for point in curve]
    assert seconds[0] > seconds[-1]
    assert seconds[-1] == pytest.approx(forecast["plain_step_seconds"])
    middle = curve[len(curve) // 2]
    assert main(["plan", trace, "--budget", str(middle["budget_bytes"]), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["peak"]["process_bytes"], alone["step_seconds"]) == (middle["process_bytes"], middle["step_seconds"])
    assert sum(middle["num_actions"].values()) == len(alone["actions"])


def test_the_table_leaves_out_budgets_that_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    points = [
        (500, 480, 2.0, {"recompute": 5}),
        (600, 480, 2.0, {"recompute": 5}),
        (700, 690, 1.0, {}),
        (800, 690, 1.0, {}),
    ]
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=800 * MIB,
        margin_bytes=MIB,
        peak=PeakBytes(allocated_bytes=1, process_bytes=690 * MIB),
        phases={},
        step_seconds=1.0,
        plain_step_seconds=1.0,
        not_modelled=(),
        curve=tuple(
            BudgetPoint(budget_bytes=budget * MIB, process_bytes=held * MIB, step_seconds=seconds, num_actions=actions)
            for budget, held, seconds, actions in points
        ),
    )
    Console(width=100).print(budget_curve_view(forecast))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[3:] == [
        "500.0 MiB 480.0 MiB 2.00 s 100.0 % ████████████████████ 5 recompute",
        "700.0 MiB 690.0 MiB 1.00 s 0.0 % none",
        "> 800.0 MiB 690.0 MiB 1.00 s 0.0 % none",
    ]


def test_it_is_not_for_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "x.trace", "--budget", "1GiB", "--device", "h100-80gb", "--ranks", "8", "--curve"]
    assert main(given) == 2
    assert "--curve: not together with --ranks" in capsys.readouterr().err
