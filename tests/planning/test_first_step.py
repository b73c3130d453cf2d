"""What a run's first step took before there was a plan counts: in the smallest budget, and in the verdict."""

from collections.abc import Callable

import msgspec
import pytest

from memwall.errors import InfeasibleError
from memwall.planning.explain import infeasible_message
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.predict.first_step import FirstStep
from memwall.predict.process import ProcessModel
from memwall.report.plan_grids import fit_of, forecast_phase_grid
from memwall.report.text import plan_verdict
from memwall.trace.records import Trace

MIB = 1 << 20

pytestmark = [pytest.mark.usefixtures("one_thread", "without_malloc"), pytest.mark.slow]


@pytest.fixture
def trace(a_trace: Callable[[str], Trace]) -> Trace:
    return a_trace("gpt")


def measured_at(trace: Trace, peak_bytes: int, device: str = "cpu") -> Trace:
    """The trace as a session records it, with a first step that held so much."""
    first = msgspec.structs.replace(trace.steps[0], process_peak_bytes=peak_bytes)
    return msgspec.structs.replace(trace, is_parked=True, device=device, steps=(first, *trace.steps[1:]))


def refusal(trace: Trace, first: FirstStep | None, budget_bytes: int) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=budget_bytes, first_step=first))
    return error.value


class TestSmallestBudget:
    def test_a_first_step_that_needs_more_than_any_plan_is_part_of_it(
        self, trace: Trace, smallest_bytes: Callable[..., int]
    ) -> None:
        needed_bytes = smallest_bytes(trace) + 50 * MIB
        first = FirstStep(needed_bytes=needed_bytes, in_memory_bytes=0, stays_from_bytes=0)
        error = refusal(trace, first, 100 * MIB)
        assert error.smallest_feasible_bytes >= needed_bytes + 16 * MIB
        assert "an evaluation of as many samples as a step has is in that; what else the script does is not" in str(
            error
        )

    def test_of_one_that_needs_less_the_next_forecast_may_differ_by_a_margin(
        self, trace: Trace, smallest_bytes: Callable[..., int]
    ) -> None:
        first = FirstStep(needed_bytes=100 * MIB, in_memory_bytes=0, stays_from_bytes=0)
        told_bytes = refusal(trace, first, 100 * MIB).smallest_feasible_bytes
        assert told_bytes == ProcessModel(trace).budget_for(smallest_bytes(trace))
        again = msgspec.structs.replace(trace, base_bytes=trace.base_bytes + 15 * MIB)
        made = make_plan(again, Settings(budget_bytes=told_bytes, first_step=first))
        assert made.forecast.fits
        assert made.forecast.smallest_feasible_budget_bytes == told_bytes

    def test_with_that_budget_parameters_may_stay_in_memory_though_here_they_left(
        self, trace: Trace, smallest_bytes: Callable[..., int]
    ) -> None:
        least = smallest_bytes(trace)
        first = FirstStep(needed_bytes=100 * MIB, in_memory_bytes=least + 30 * MIB, stays_from_bytes=least)
        assert refusal(trace, first, 100 * MIB).smallest_feasible_bytes > least + 30 * MIB
        leaves = msgspec.structs.replace(first, stays_from_bytes=least + 100 * MIB)
        assert refusal(trace, leaves, 100 * MIB).smallest_feasible_bytes == ProcessModel(trace).budget_for(least)

    def test_another_model_on_disk_counts_from_where_it_would_be_built_in_memory(
        self, trace: Trace, smallest_bytes: Callable[..., int]
    ) -> None:
        """GIVEN a teacher that was built on disk THEN it stays there beside parameters that do, under small budgets."""
        others_bytes = 30 * MIB

        def told_bytes(**others: int) -> int:
            first = FirstStep(needed_bytes=100 * MIB, in_memory_bytes=0, stays_from_bytes=1 << 40, **others)
            settings = Settings(budget_bytes=100 * MIB, first_step=first, is_built_on_disk=True)
            with pytest.raises(InfeasibleError) as error:
                make_plan(trace, settings)
            return error.value.smallest_feasible_bytes

        in_memory = told_bytes()
        assert told_bytes(others_bytes=others_bytes, built_from_bytes=1 << 40) == in_memory - others_bytes
        assert told_bytes(others_bytes=others_bytes, built_from_bytes=in_memory - others_bytes) == in_memory

    def test_a_budget_that_the_first_step_kept_to_needs_no_margin_for_it(
        self, trace: Trace, smallest_bytes: Callable[..., int]
    ) -> None:
        budget_bytes = smallest_bytes(trace) + 40 * MIB
        first = FirstStep(needed_bytes=budget_bytes - MIB, in_memory_bytes=0, stays_from_bytes=0)
        made = make_plan(trace, Settings(budget_bytes=budget_bytes, first_step=first))
        assert made.forecast.smallest_feasible_budget_bytes == budget_bytes


class TestStepsThatNoPlanMakesSmaller:
    """A policy of a few KiB whose refusal said "lower the resolution", below "run it without memwall"."""

    @staticmethod
    def said(trace: Trace, added_bytes: int) -> str:
        held_bytes = trace.base_bytes + added_bytes
        return infeasible_message(
            trace, MIB, held_bytes + 32 * MIB, ("lower the resolution",), is_running=True, plain_bytes=held_bytes
        )

    def test_of_a_small_one_nothing_is_advised_but_to_run_it_without(self, trace: Trace) -> None:
        said = self.said(trace, 2 * MIB)
        assert said.endswith("the script is too small for a plan to pay, run it without memwall")

    def test_a_large_one_is_not_called_small(self, trace: Trace) -> None:
        said = self.said(trace, 2000 * MIB)
        assert "too small" not in said
        assert said.endswith("no plan of the allowed ways makes its step smaller\n  - lower the resolution")


class TestVerdict:
    @pytest.fixture
    def planned(self, trace: Trace, smallest_bytes: Callable[..., int]) -> Callable[..., Plan]:
        """A plan for a budget that has room for every step, and a first one that held so much more than it."""
        budget_bytes = smallest_bytes(trace) + 40 * MIB

        def made(excess_bytes: int) -> Plan:
            return make_plan(measured_at(trace, budget_bytes + excess_bytes), Settings(budget_bytes=budget_bytes))

        return made

    def test_a_first_step_that_passed_the_budget_does_not_fit(self, planned: Callable[..., Plan]) -> None:
        found = planned(8 * MIB)
        assert not found.forecast.fits
        assert fit_of(found.forecast) == "does-not-fit"
        assert plan_verdict(found)[1].startswith("does not fit: after the first step's measured ")

    def test_one_that_kept_to_it_fits(self, planned: Callable[..., Plan]) -> None:
        assert planned(0).forecast.fits

    def test_its_row_says_that_it_was_measured(self, planned: Callable[..., Plan]) -> None:
        rows = [row[0] for row in forecast_phase_grid(planned(0).forecast).rows]
        assert {"first step, measured", "steady step"} <= set(rows)
