"""What a plan says of the time that moving takes, and what a report says where the step keeps to none of it."""

import msgspec
import pytest
from golden_text import drawn

from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.predict.link_time import LinkTime
from memwall.report.plan_grids import plan_facts
from memwall.report.run_grids import time_findings
from memwall.report.text import run_report

GB = 10**9
LINK = LinkTime(
    tier="disk",
    written_bytes=2 * GB,
    read_bytes=2 * GB,
    batched_bytes=0,
    write_bytes_per_second=2.0 * GB,
    read_bytes_per_second=1.0 * GB,
    compute_seconds=4.0,
)


def with_link(plan: Plan, link: LinkTime | None) -> Plan:
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, link=link))


def test_a_plan_says_what_passes_at_which_speed_and_what_bounds_the_step(plan: Plan) -> None:
    """GIVEN a step of 8 samples that computes 4 s and moves 3 s."""
    facts = dict(plan_facts(with_link(plan, LINK)))
    assert facts["through disk"] == "1.86 GiB written, 1.86 GiB read in a step, at 1.86 GiB and 953.7 MiB a second"
    assert facts["bounds of the step"] == (
        "4.00 s computing, 3.00 s moving: 4.00 s if one hides the other, 7.00 s if not; computing takes longer from 6 "
        "samples a step on, 8 now"
    )


def test_of_what_grows_with_the_batch_no_batch_is_named(plan: Plan) -> None:
    growing = msgspec.structs.replace(LINK, tier="host", batched_bytes=2 * GB, compute_seconds=3.0)
    facts = dict(plan_facts(with_link(plan, growing)))
    assert "through disk" not in facts
    assert facts["through host memory"].startswith("1.86 GiB written")
    assert facts["bounds of the step"].endswith("6.00 s if not")


def test_where_all_that_moves_grows_with_the_batch_and_is_hidden_no_batch_is_named(plan: Plan) -> None:
    hidden = msgspec.structs.replace(LINK, batched_bytes=2 * GB)
    assert dict(plan_facts(with_link(plan, hidden)))["bounds of the step"].endswith("7.00 s if not")


def test_a_plan_that_moves_nothing_says_nothing_of_it(plan: Plan) -> None:
    assert not any(name.startswith(("through", "bounds")) for name, _ in plan_facts(with_link(plan, None)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (7.8, "The step took 7.80 s, and computing and moving one after the other was to take 7.00 s: the disk is"),
        (7.6, None),
        (3.9, None),
        (3.7, "The step took 3.70 s, less than the 4.00 s that computing alone was to take: most batches were smaller"),
        (None, None),
    ],
)
def test_a_step_outside_its_bounds_is_reported(run: RunReport, seconds: float | None, words: str | None) -> None:
    report = msgspec.structs.replace(
        run,
        forecast=msgspec.structs.replace(run.forecast, link=LINK),
        measured=msgspec.structs.replace(run.measured, steps=5, step_seconds_median=seconds),
    )
    shown = " ".join(drawn(run_report(report)))
    if words is None:
        assert time_findings(report) == ()
        assert "The step took" not in shown
    else:
        (line,) = time_findings(report)
        assert line.startswith(words)
        assert "The step took" in shown


def test_where_moving_bounds_the_step_it_is_what_was_forecast_too_long(run: RunReport) -> None:
    slow = msgspec.structs.replace(LINK, write_bytes_per_second=0.2 * GB)
    report = msgspec.structs.replace(
        run,
        forecast=msgspec.structs.replace(run.forecast, link=slow),
        measured=msgspec.structs.replace(run.measured, steps=5, step_seconds_median=9.0),
    )
    assert "less than the 12.00 s that the disk alone was to take" in " ".join(time_findings(report))


def test_of_a_few_steps_nothing_is_said(run: RunReport) -> None:
    report = msgspec.structs.replace(
        run,
        forecast=msgspec.structs.replace(run.forecast, link=LINK),
        measured=msgspec.structs.replace(run.measured, steps=4, step_seconds_median=20.0),
    )
    assert time_findings(report) == ()
