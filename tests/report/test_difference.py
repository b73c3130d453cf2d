"""Two files beside each other: what counts as growth, what is said about unlike files, and how it looks."""

import msgspec
import pytest
from golden_text import drawn, golden

from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.report.comparison import plan_side, run_side, trace_side
from memwall.report.difference import Difference, Quantity, Side, difference_of, exit_status
from memwall.report.text import difference_report
from memwall.trace.records import Trace

MIB = 1 << 20


def side(peak_bytes: int, source: str = "a.trace") -> Side:
    peak = Quantity(group="peak", name="live tensors", num_bytes=peak_bytes)
    return Side(source=source, kind="trace", tag="cpu-measured", quantities=(peak,), conditions={})


def grown(trace: Trace) -> Trace:
    """The same trace with activations of half the size more, and another module that holds some."""
    steps = tuple(
        msgspec.structs.replace(
            step,
            storages=tuple(
                msgspec.structs.replace(s, nbytes=s.nbytes * 3 // 2, module=min(s.module, 1))
                if s.category == "activation"
                else s
                for s in step.storages
            ),
        )
        for step in trace.steps
    )
    return msgspec.structs.replace(trace, steps=steps, micro_batch=6, source="fake")


@pytest.fixture
def traces(trace: Trace) -> Difference:
    return difference_of(trace_side(trace, "old.trace"), trace_side(grown(trace), "new.trace"), fail_over_percent=5)


@pytest.mark.parametrize(
    ("before", "after", "percent", "status"),
    [
        (100, 105, 5.0, 0),
        (1000, 1051, 5.0, 3),
        (100, 100, 0.0, 0),
        (100, 101, 0.0, 3),
        (100, 50, 0.0, 0),
        (0, 0, 0.0, 0),
        (0, 1, 1000.0, 3),
        (100, 900, None, 0),
    ],
)
def test_a_peak_may_grow_by_so_many_percent_and_not_by_a_byte_more(
    before: int, after: int, percent: float | None, status: int
) -> None:
    assert exit_status(difference_of(side(before), side(after), fail_over_percent=percent)) == status


def test_only_the_peak_is_limited() -> None:
    """GIVEN a phase that doubled below a peak that did not grow THEN the status is 0, and the phase is shown."""
    phases = [Quantity(group="phase", name="forward", num_bytes=size) for size in (10, 20)]
    sides = [msgspec.structs.replace(side(100), quantities=(*side(100).quantities, phase)) for phase in phases]
    difference = difference_of(*sides, fail_over_percent=5)
    assert exit_status(difference) == 0
    assert [(c.group, c.change_bytes, c.change_percent) for c in difference.changes] == [
        ("peak", 0, 0.0),
        ("phase", 10, 100.0),
    ]


def test_modules_are_those_that_changed_most() -> None:
    def holding(offset: int) -> Side:
        held = [Quantity(group="module", name=f"blocks.{k}", num_bytes=100 + k * offset) for k in range(12)]
        return msgspec.structs.replace(side(100), quantities=tuple(held))

    names = [change.name for change in difference_of(holding(0), holding(-5)).changes]
    assert names == [f"blocks.{k}" for k in range(11, 1, -1)]


def test_what_the_traces_do_not_have_in_common_is_said(traces: Difference) -> None:
    assert traces.notes == ("A is cpu-measured, B is simulated", "micro-batch: A has 4, B has 6")


def test_a_peak_that_one_side_lacks_is_said() -> None:
    nothing = msgspec.structs.replace(side(0), quantities=())
    assert difference_of(side(7), nothing).notes == ("only A has live tensors; the other counts as 0 B",)


@pytest.mark.parametrize("width", [80, 160])
class TestExactText:
    def test_traces(self, traces: Difference, width: int) -> None:
        assert drawn(difference_report(traces), width) == golden(f"diff_trace_{width}.txt")

    def test_plans(self, plan: Plan, width: int) -> None:
        forecast = msgspec.structs.replace(
            plan.forecast,
            peak=msgspec.structs.replace(plan.forecast.peak, process_bytes=440 * MIB, disk_bytes=0),
            phases={"steady_step": plan.forecast.phases["first_step"]},
            actions=(),
        )
        leaner = msgspec.structs.replace(plan, forecast=forecast)
        difference = difference_of(plan_side(plan, "a.json"), plan_side(leaner, "b.json"), fail_over_percent=0)
        assert drawn(difference_report(difference), width) == golden(f"diff_plan_{width}.txt")

    def test_runs(self, run: RunReport, width: int) -> None:
        peak = msgspec.structs.replace(run.measured.peak, process_bytes=470 * MIB)
        measured = msgspec.structs.replace(run.measured, peak=peak, step_seconds_median=None, oom_recoveries=1)
        later = msgspec.structs.replace(run, measured=measured)
        difference = difference_of(run_side(run, "a.json"), run_side(later, "b.json"))
        assert drawn(difference_report(difference), width) == golden(f"diff_run_{width}.txt")
