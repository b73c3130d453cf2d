"""A technique that this file alone knows: found, planned, priced, explained, drawn, exported and read from a file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from memwall.errors import PlanError, UsageError
from memwall.planning.action import Action, Exactness
from memwall.planning.location import Location
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.planfile import Plan
from memwall.planning.search import plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.technique import Technique, allowable, register, technique_of, techniques, unregister
from memwall.predict.curve import live_peak_bytes
from memwall.report.plan_grids import action_grid
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


class Halve(Action, frozen=True, kw_only=True, tag="toy-halve"):
    """Keeps the optimizer's state in half of its bytes."""

    exactness: Exactness = "changes-numerics"


class Halving(Technique[Halve]):
    record = Halve
    order = 99
    step_rank = 2
    allow = "toy"
    allow_means = "state in half of its bytes"
    choice = "worth-digits"
    advice_rank = 9

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        return None if trace.optimizer == "AdamW" else f"only AdamW's state is halved; {trace.optimizer} steps"

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        return None if "toy" in allow else "halve the optimizer's state: --allow toy"

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        if "toy" not in inputs.settings.allow:
            return "not allowed"
        saved_bytes = sum(s.nbytes // 2 for s in inputs.steady.storages if s.category == "optimizer_state")
        return (Location(actions=(Halve(saved_bytes=saved_bytes, cost_seconds=1e-9),)),)

    def step(self, trace: Trace, step: Step, action: Halve) -> Step:
        halved = (
            msgspec.structs.replace(s, nbytes=s.nbytes // 2) if s.category == "optimizer_state" else s
            for s in step.storages
        )
        return msgspec.structs.replace(step, storages=tuple(halved))

    def what(self, action: Halve) -> str:
        return "halve the optimizer's state"

    def where(self, actions: Sequence[Halve]) -> str:
        return "between steps"

    def lever(self, action: Halve) -> str:
        return "halved state"

    def binding(self, trace: Trace, actions: Sequence[Halve]) -> Iterator[str]:
        for action in actions:
            yield f"{action.saved_bytes} bytes of state were halved away"


@pytest.fixture
def toy() -> Iterator[None]:
    register(Halving())
    yield
    unregister("toy-halve")


@pytest.fixture
def tight(
    toy: None,
    a_trace: Callable[[str], Trace],
    without_disk: Callable[[Trace], Trace],
    smallest_bytes: Callable[..., int],
) -> tuple[Trace, int]:
    """A trace, and a budget between the least with the toy and the least without."""
    trace = without_disk(a_trace("gpt"))
    least, with_toy = smallest_bytes(trace), smallest_bytes(trace, allow=("toy",))
    assert with_toy < least
    return trace, (with_toy + least) // 2


def test_it_is_planned_priced_and_explained_where_it_is_allowed(tight: tuple[Trace, int]) -> None:
    trace, budget_bytes = tight
    found = plan(trace, budget=budget_bytes, allow=("toy",))
    (action,) = (action for action in found.actions if isinstance(action, Halve))
    assert found.forecast.fits
    assert any("bytes of state were halved away" in line for line in found.forecast.binding)
    assert [lever.freed_bytes for lever in found.forecast.levers if lever.name == "halved state"] == [
        action.saved_bytes
    ]
    assert live_peak_bytes(step_under_plan(trace, found), trace.device) < live_peak_bytes(
        steady_step(trace), trace.device
    )


def test_a_person_hears_of_it_where_nothing_fits_and_why_it_cannot_be_used(tight: tuple[Trace, int]) -> None:
    trace, budget_bytes = tight
    with pytest.raises(Exception, match="halve the optimizer's state: --allow toy"):
        plan(trace, budget=budget_bytes)
    other = msgspec.structs.replace(trace, optimizer="SGD")
    with pytest.raises(UsageError, match="--allow toy: only AdamW's state is halved; SGD steps"):
        plan(other, budget=budget_bytes, allow=("toy",))


def test_it_is_drawn_and_kept_by_memwall_where_others_export_the_plan(toy: None) -> None:
    (row,) = action_grid((Halve(saved_bytes=4, cost_seconds=1.0),)).rows
    assert (row[0], row[1], row[-1]) == ("halve the optimizer's state", "between steps", "changes-numerics")
    assert allowable()["toy"] == "state in half of its bytes"
    assert technique_of(Halve()).environment(Halve()) is None


def test_a_plan_file_keeps_it_and_is_refused_where_nobody_knows_it(tight: tuple[Trace, int], tmp_path: Path) -> None:
    trace, budget_bytes = tight
    found = plan(trace, budget=budget_bytes, allow=("toy",))
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    unregister("toy-halve")
    try:
        with pytest.raises(PlanError, match=r"Invalid value 'toy-halve' - at `\$\.forecast\.actions\[\d+\]\.kind`"):
            Plan.load(tmp_path / "plan.json")
    finally:
        register(Halving())


def test_no_other_technique_can_take_its_tag_or_its_order(toy: None) -> None:
    num_known = len(techniques())
    with pytest.raises(ValueError, match="technique 'toy-halve' of order 99: 'toy-halve' has that already"):
        register(Halving())
    assert len(techniques()) == num_known
