"""The tables as a user sees them: exact text on terminals of 80 and 160 columns."""

import io
import re

import msgspec
import pytest
from golden_text import GOLDEN, drawn, golden
from rich.console import Console

from memwall.observe.run_report import RunReport
from memwall.planning.action import Action
from memwall.planning.forecast import PeakBytes
from memwall.planning.paths import block_ranges
from memwall.planning.planfile import Plan
from memwall.planning.technique import techniques
from memwall.planning.techniques.compiled_graphs import CompiledGraphs
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.reshard import Reshard
from memwall.report.plan_grids import action_grid, fit_of
from memwall.report.run_grids import Outcome, loss_difference, run_grid
from memwall.report.summary import run_summary
from memwall.report.text import (
    comparison,
    plan_report,
    plan_verdict,
    run_report,
    run_verdict,
    trace_report,
    verify_status,
)
from memwall.trace.records import Step, Trace

MIB = 1 << 20


@pytest.mark.parametrize("width", [80, 160])
class TestExactText:
    def test_trace(self, trace: Trace, width: int) -> None:
        assert drawn(trace_report(trace), width) == golden(f"trace_{width}.txt")

    def test_plan(self, plan: Plan, width: int) -> None:
        assert drawn(plan_report(plan), width) == golden(f"plan_{width}.txt")

    def test_run(self, run: RunReport, width: int) -> None:
        assert drawn(run_report(run), width) == golden(f"run_{width}.txt")

    def test_comparison(self, outcomes: tuple[Outcome, ...], width: int) -> None:
        assert drawn(comparison(outcomes), width) == golden(f"comparison_{width}.txt")


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_no_table_uses_decimal_units_or_is_too_wide(name: str) -> None:
    text = "\n".join(golden(name))
    assert re.findall(r"\d (?:MiB|GiB|KiB)\b", text), "no size found: the pattern is wrong"
    assert re.findall(r"\d\s*(?:[kKMGT]B)\b", text) == []
    assert max(len(line) for line in text.splitlines()) <= int(name.removesuffix(".txt").rpartition("_")[2])


def test_a_terminal_without_unicode_gets_ascii(trace: Trace, plan: Plan) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    console.print(trace_report(trace))
    console.print(plan_report(plan))
    file.flush()
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "#################### < peak" in text
    assert "v fits: 460.0 MiB predicted" in text


def test_a_module_path_is_not_read_as_markup(trace: Trace) -> None:
    assert any(line.startswith("blocks[bold].1   360.0 MiB") for line in drawn(trace_report(trace)))


def test_a_trace_without_lines_has_no_table_of_them(trace: Trace) -> None:
    assert "In the peak, by line" not in drawn(trace_report(msgspec.structs.replace(trace, lines=())))


def test_the_largest_lines_are_shown_and_the_rest_is_summed(trace: Trace, step: Step) -> None:
    storages = tuple(msgspec.structs.replace(step.storages[1], nbytes=(20 - k) << 20, line=k) for k in range(13))
    lines = tuple(f"model.py:{k} forward" for k in range(13))
    many = msgspec.structs.replace(trace, steps=(msgspec.structs.replace(step, storages=storages),), lines=lines)
    shown = [" ".join(line.split()) for line in drawn(trace_report(many))]
    start = shown.index("In the peak, by line") + 3
    assert shown[start] == "model.py:0 forward activation 20.0 MiB 11.0%"
    assert shown[start + 10] == "3 others 27.0 MiB 14.8%"


class TestProcessNote:
    """What the process held beside the tensors, where the two can be compared."""

    def note(self, trace: Trace) -> str:
        text = " ".join(drawn(trace_report(trace)))
        return "".join(text.partition("The process held")[1:]).partition(" Counted")[0].strip()

    def with_process_bytes(self, trace: Trace, num_mib: int) -> Trace:
        steps = tuple(msgspec.structs.replace(step, process_peak_bytes=num_mib * MIB) for step in trace.steps)
        return msgspec.structs.replace(trace, steps=steps)

    def test_what_no_tensor_holds_is_said(self, trace: Trace) -> None:
        assert self.note(self.with_process_bytes(trace, 850)) == (
            "The process held 850.0 MiB at most in this step, against 500.0 MiB of live tensors at the peak and "
            "300.0 MiB from before the step; the other 50.0 MiB are library workspaces, memory that the allocator "
            "keeps without a tensor in it, and the recording itself."
        )

    def test_where_it_was_not_metered_nothing_is_said(self, trace: Trace) -> None:
        assert self.note(self.with_process_bytes(trace, 0)) == ""

    def test_where_saved_tensors_were_elsewhere_nothing_is_said(self, trace: Trace) -> None:
        assert self.note(msgspec.structs.replace(trace, is_parked=True)) == ""


def test_a_trace_without_times_has_no_table_of_times(trace: Trace) -> None:
    untimed = tuple(
        msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, seconds=0.0) for op in step.ops))
        for step in trace.steps
    )
    lines = drawn(trace_report(msgspec.structs.replace(trace, steps=untimed, source="fake")))
    assert "Operators by time" not in lines
    assert "backward    500.0 MiB   ████████████████████ ◄ peak         -     2" in lines
    assert "no times: nothing was computed" in " ".join(lines)


def test_a_trace_without_operations_says_what_it_needs(trace: Trace) -> None:
    assert drawn(trace_report(msgspec.structs.replace(trace, steps=()))) == [
        "· no operation was recorded; a trace needs one whole training step"
    ]


def _with(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, **changes))


class TestPlanVerdict:
    def test_inside_the_margin(self, plan: Plan) -> None:
        assert plan_verdict(_with(plan, fits=False, budget_bytes=470 * MIB)) == (
            "inside-margin",
            "fits only inside the margin: 460.0 MiB predicted + 12.0 MiB margin, budget 470.0 MiB",
        )

    def test_does_not_fit(self, plan: Plan) -> None:
        assert plan_verdict(_with(plan, fits=False, budget_bytes=400 * MIB)) == (
            "does-not-fit",
            "does not fit: 460.0 MiB predicted + 12.0 MiB margin is 72.0 MiB over the budget of 400.0 MiB",
        )

    def test_a_first_step_that_passed_the_budget_before_there_was_a_plan_is_told_apart(self, plan: Plan) -> None:
        phases = plan.forecast.phases
        first = msgspec.structs.replace(phases["first_step"], process_bytes=481 * MIB)
        peak = msgspec.structs.replace(plan.forecast.peak, process_bytes=481 * MIB)
        late = _with(plan, peak=peak, phases={**phases, "first_step": first}, measured_phases=("first_step",))
        sizes = "after the first step's measured 481.0 MiB, 455.0 MiB predicted + 12.0 MiB margin"
        assert plan_verdict(_with(late, fits=False)) == (
            "does-not-fit",
            f"does not fit: {sizes}, budget 480.0 MiB",
        )
        # On a CUDA device it is no part of the promise.
        assert plan_verdict(late) == ("fits", f"fits: {sizes} in a budget of 480.0 MiB")

    def test_without_a_budget(self, plan: Plan) -> None:
        free = _with(plan, fits=None, budget_bytes=None)
        assert fit_of(free.forecast) == "no-budget"
        assert plan_verdict(free)[1] == "no budget given: 460.0 MiB predicted + 12.0 MiB margin"

    @pytest.mark.parametrize(("budget_mib", "sign"), [(480, "✓ fits: "), (470, "~ fits only"), (400, "✗ does not fit")])
    def test_the_first_line_begins_with_its_sign(self, plan: Plan, budget_mib: int, sign: str) -> None:
        shown = _with(plan, fits=budget_mib == 480, budget_bytes=budget_mib * MIB)
        assert drawn(plan_report(shown))[0].startswith(sign)

    def test_what_would_make_it_fit_is_listed(self, plan: Plan) -> None:
        tight = _with(plan, fits=False, budget_bytes=400 * MIB, relaxations=("allow a disk: -80.0 MiB",))
        lines = drawn(plan_report(tight))
        assert lines[lines.index("What would make it fit:") + 1] == "  allow a disk: -80.0 MiB"


def test_a_plan_without_actions_says_that_none_is_needed() -> None:
    assert action_grid(()).rows == (("none needed", "-", "-", "-", "bit-exact"),)


def test_every_kind_of_action_is_drawn(actions: tuple[Action, ...]) -> None:
    # No plan has the first three beside state on disk.
    unlike = (LowBitState(), StepOnCpu(bucket_bytes=2, min_bytes=1), GradientRelease(window_bytes=2))
    every = (*actions, *unlike, CompiledGraphs(ratio=0.5), Reshard(units=("blocks.0", "blocks.1")))
    assert {type(action) for action in every} == {technique.record for technique in techniques()}
    for action in every:
        (row,) = action_grid((action,)).rows
        assert all(row), row


def test_blocks_of_another_treatment_are_another_row(actions: tuple[Action, ...]) -> None:
    first = actions[0]
    other = msgspec.structs.replace(actions[1], exactness="equivalent")
    assert [row[1] for row in action_grid((first, other)).rows] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (["h.0", "h.1", "h.2"], "h.0-2"),
        (["h.0", "h.2"], "h.0, h.2"),
        (["enc.0", "dec.1"], "dec.1, enc.0"),
        (["m.0.h.1", "m.1.h.2"], "m.0.h.1, m.1.h.2"),
        (["h.0.mlp", "h.1.mlp"], "h.0-1.mlp"),
        (["layer4", "layer5"], "layer4, layer5"),
        ([""], "whole model"),
    ],
)
def test_block_ranges(blocks: list[str], expected: str) -> None:
    assert block_ranges(blocks) == expected


def _measured(run: RunReport, **changes: object) -> RunReport:
    return msgspec.structs.replace(run, measured=msgspec.structs.replace(run.measured, **changes))


def _peaking_at(run: RunReport, num_mib: int) -> RunReport:
    return _measured(run, peak=PeakBytes(allocated_bytes=0, process_bytes=num_mib * MIB))


class TestVerify:
    @pytest.mark.parametrize(("num_mib", "status"), [(400, 0), (455, 0), (456, 4), (480, 4), (481, 5)])
    def test_status_of_a_steady_peak(self, run: RunReport, num_mib: int, status: int) -> None:
        """GIVEN a steady step foreseen at 455 MiB, a first one at 460 MiB, and a budget of 480 MiB."""
        assert verify_status(_peaking_at(run, num_mib)) == status

    @pytest.mark.parametrize("device", ["cpu", "cuda:0"])
    def test_a_first_step_over_the_budget_counts(self, run: RunReport, device: str) -> None:
        report = _measured(run, first_step_peak_bytes=500 * MIB)
        report = msgspec.structs.replace(report, forecast=msgspec.structs.replace(run.forecast, device=device))
        assert verify_status(report) == 5
        assert run_verdict(report)[1] == "exceeded the budget of 480.0 MiB: 500.0 MiB measured, 20.0 MiB over"

    def test_the_run_may_have_seen_more_than_its_steps_show(self, run: RunReport) -> None:
        report = msgspec.structs.replace(run, within_budget=False)
        assert verify_status(report) == 5
        assert run_verdict(report)[1] == (
            "exceeded the budget of 480.0 MiB: 458.0 MiB measured in the steps, more outside them"
        )
        assert "Within the budget: no" in drawn(run_report(report))

    def test_a_peak_outside_the_steps_is_not_held_against_the_forecast(self, run: RunReport) -> None:
        """GIVEN steps of 450 MiB, foreseen at 455, and a script that copies its weights at the end, up to 500 MiB."""
        report = _measured(_peaking_at(run, 500), steady_peak_bytes=450 * MIB)
        assert verify_status(report) == 5
        assert run_verdict(report)[1] == (
            "exceeded the budget of 480.0 MiB: 500.0 MiB measured, 20.0 MiB over outside the training steps, in "
            "evaluation, saving or other work of the script; the steps reached 450.0 MiB; run again with a budget of "
            "512.0 MiB"
        )
        rows = {row[0]: row[1:] for row in run_grid(report).rows}
        assert rows["process peak, steady step"] == ("455.0 MiB", "450.0 MiB", "+1.1%")
        assert rows["process peak, outside the steps"] == ("-", "500.0 MiB", "-")
        assert rows["not itemised in the forecast"] == ("-", "-5.0 MiB", "-")

    def test_a_peak_under_a_plan_that_was_replaced_is_said_to_be_of_a_step(self, run: RunReport) -> None:
        """GIVEN a step of 500 MiB, after which the run was planned anew, and further ones of 450."""
        report = _measured(_peaking_at(run, 500), steady_peak_bytes=450 * MIB, replaced_peak_bytes=500 * MIB)
        assert verify_status(report) == 5
        assert run_verdict(report)[1] == (
            "exceeded the budget of 480.0 MiB: 500.0 MiB measured, 20.0 MiB over in a step under a plan that another "
            "one has replaced since; the steps under that reached 450.0 MiB"
        )
        assert "process peak, outside the steps" not in [row[0] for row in run_grid(report).rows]

    def test_a_first_step_that_was_measured_before_the_plan_was_not_predicted(self, run: RunReport) -> None:
        forecast = msgspec.structs.replace(run.forecast, measured_phases=("first_step",))
        rows = {row[0]: row[1:] for row in run_grid(msgspec.structs.replace(run, forecast=forecast)).rows}
        assert rows["process peak, first step"] == ("-", "450.0 MiB", "-")

    def test_a_peak_outside_the_steps_within_the_budget_is_no_excess(self, run: RunReport) -> None:
        report = _measured(_peaking_at(run, 470), steady_peak_bytes=450 * MIB)
        assert verify_status(report) == 0
        assert run_verdict(report)[1] == "within the budget: 470.0 MiB measured of 480.0 MiB"

    def test_a_script_that_failed_has_kept_to_its_budget_until_then(self, run: RunReport) -> None:
        report = _peaking_at(run, 450)
        kept = "within the budget: 450.0 MiB measured of 480.0 MiB"
        assert run_verdict(report, status=1) == ("no-budget", f"the script ended with status 1; until then {kept}")
        over = _peaking_at(run, 481)
        assert run_verdict(over, status=1) == run_verdict(over)

    def test_sizes_of_one_thing_are_rounded_alike(self, run: RunReport) -> None:
        """GIVEN a budget and a peak between two tenths of a MiB THEN verdict, table and page show the same digits."""
        budget_bytes, peak_bytes = 1_009_653_841, 1_009_486_069  # 962.88 and 962.72 MiB
        forecast = msgspec.structs.replace(run.forecast, budget_bytes=budget_bytes)
        report = _measured(run, peak=PeakBytes(allocated_bytes=0, process_bytes=peak_bytes))
        report = msgspec.structs.replace(report, budget_bytes=budget_bytes, forecast=forecast)
        assert "962.8 MiB measured" in run_verdict(report)[1]
        rows = {row[0]: row[1:] for row in run_grid(report).rows}
        assert rows["process peak, steady step"][1] == "962.8 MiB"
        for shown in (drawn(run_report(report)), drawn(run_summary(report))):
            assert "962.9 MiB" not in shown
            assert "962.7 MiB" not in shown

    def test_blocks_that_could_not_be_recomputed_are_named(self, run: RunReport) -> None:
        report = _measured(run, not_recomputed={"layers.3": "its second run differs"})
        assert "Not recomputed: 'layers.3': its second run differs." in drawn(run_report(report))

    def test_a_step_that_proved_actions_is_told_apart(self, run: RunReport) -> None:
        """GIVEN a device whose first step under a plan took more of the budget THEN no forecast is held against it."""
        report = _measured(_peaking_at(run, 455), proof_peak_bytes=470 << 20)
        assert run_verdict(report)[0] == "fits"
        assert "470.0 MiB in one that proved the plan" in " ".join(" ".join(drawn(run_summary(report))).split())
        rows = {row[0]: row[1:] for row in run_grid(report).rows}
        assert rows["process peak, step that proved actions"] == ("-", "470.0 MiB", "-")

    def test_within_the_forecast(self, run: RunReport) -> None:
        report = _peaking_at(run, 455)
        assert drawn(run_report(report))[0] == "✓ within the budget: 455.0 MiB measured of 480.0 MiB"
        assert not any("not itemised" in line for line in drawn(run_report(report)))

    def test_a_forecast_that_was_too_high_has_its_gap_too(self, run: RunReport) -> None:
        rows = {row[0]: row[1:] for row in run_grid(_peaking_at(run, 440)).rows}
        assert rows["not itemised in the forecast"] == ("-", "-15.0 MiB", "-")


class TestLossDifference:
    def test_equal_is_said_to_be_bit_for_bit(self) -> None:
        run = Outcome(name="a", losses=(1.5, 0.5))
        assert loss_difference(run, run) == "0, bit for bit, over 2 steps"

    def test_the_largest_difference_of_the_common_steps(self) -> None:
        first, second = Outcome(name="a", losses=(1.0, 2.0, 9.0)), Outcome(name="b", losses=(1.0, 2.25))
        assert loss_difference(first, second) == "2.5e-01 over 2 steps"

    def test_a_loss_that_is_no_number_is_never_equal(self) -> None:
        first, second = Outcome(name="a", losses=(1.0, 2.0)), Outcome(name="b", losses=(1.0, float("nan")))
        assert loss_difference(first, second) == "nan over 2 steps"

    def test_nothing_to_compare(self) -> None:
        assert loss_difference(Outcome(name="a"), Outcome(name="b", losses=(1.0,))) == "-"


@pytest.mark.parametrize("number", [1, 2])
def test_one_plan_and_one_step_are_told_as_one(run: RunReport, number: int) -> None:
    measured = msgspec.structs.replace(run.measured, num_replans=number, oom_recoveries=number)
    shown = "\n".join(drawn(run_summary(msgspec.structs.replace(run, measured=measured))))
    assert ("1 plan was made again" in shown, "1 step was done again" in shown) == (number == 1, number == 1)
    assert ("2 plans were made again" in shown, "2 steps were done again" in shown) == (number == 2, number == 2)
