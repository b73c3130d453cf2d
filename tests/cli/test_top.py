"""`memwall top` shows the figures that `memwall run --metrics` writes."""

import json
from pathlib import Path

import msgspec
import pytest

from memwall.cli.app import main
from memwall.observe.last_steps import last_steps
from memwall.report.steps_view import steps_view
from memwall.session.watch.step_metrics import StepMetrics

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
MIB = 1 << 20

STEP = StepMetrics(
    step=7,
    unix_seconds=1000.0,
    is_planned=True,
    step_seconds=0.5,
    peak_bytes=90 * MIB,
    budget_bytes=100 * MIB,
    forecast_bytes=99 * MIB,
    bytes_to_tier=2 * MIB,
    bytes_from_tier=3 * MIB,
    num_actions=4,
    num_replans=1,
    oom_recoveries=0,
    forecast_by_category={"activation": 5 * MIB, "optimizer_state": 2 * MIB},
)


@pytest.mark.slow
def test_a_run_writes_each_step_and_top_shows_the_last(
    folder: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(
        ["run", "--plan", str(made / "plan.json"), "--metrics", "steps.jsonl", "--report", "run.json", PLAIN]
    ) in (0, 5)
    steps, report = last_steps(Path("steps.jsonl")), json.loads(Path("run.json").read_text())
    assert [one.step for one in steps] == list(range(1, report["measured"]["steps"] + 1))
    assert max(one.peak_bytes for one in steps) == report["measured"]["steady_peak_bytes"]
    capsys.readouterr()
    assert main(["top", "--once", "steps.jsonl"]) == 0
    assert f"step      {steps[-1].step}, ended" in capsys.readouterr().out
    assert main(["top", "--json", "steps.jsonl"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StepMetrics) == steps[-1]


def test_what_is_held_stands_beside_budget_and_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    over = msgspec.structs.replace(STEP, step=6, peak_bytes=101 * MIB, step_seconds=1.0)
    Console(width=100).print(steps_view([over, STEP], now_seconds=1002.0))
    shown = capsys.readouterr().out
    for line in (
        "step      7, ended 2.00 s ago; 4 actions",
        "held      90.0 MiB  [███████████████████████████░░░] 90.0 % of budget",
        "foreseen  99.0 MiB, +10.0 % of what was held",
        "of that   activation 5.0 MiB, optimizer state 2.0 MiB",
        "seconds   750.0 ms a step  █▄",
        "moved     2.0 MiB out, 3.0 MiB back a step, 10.0 MiB/s",
        "again     1 plans, 0 steps after memory ran out",
        "1 of the last 2 steps passed the budget, step 6 by 1.0 MiB.",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file steps.jsonl; expected a file that memwall run --metrics FILE writes"),
        ("", "steps.jsonl has no step yet"),
        ("{}\n", "steps.jsonl holds no steps of a run"),
    ],
)
def test_a_file_without_steps_is_refused(
    content: str | None, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("steps.jsonl").write_text(content)
    assert main(["top", "steps.jsonl"]) == 2
    assert said in capsys.readouterr().err
