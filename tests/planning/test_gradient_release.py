"""Steps within backward in plans: chosen by their word, priced, explained, and refused in words."""

from collections.abc import Callable

import msgspec
import pytest

from memwall.errors import InfeasibleError, UsageError
from memwall.planning.modes import MODES, allowed_words
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.search import plan
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.planning.techniques.gradient_release import TECHNIQUE, GradientRelease
from memwall.trace.records import GradientUse, Step, Trace

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")
ALLOWED = ("gradient-release",)


def with_use(trace: Trace, use: GradientUse | None) -> Trace:
    steps = tuple(msgspec.structs.replace(step, gradient_use=use) for step in trace.steps)
    return msgspec.structs.replace(trace, steps=steps)


@pytest.fixture
def trace(a_trace: Callable[[str], Trace], without_disk: Callable[[Trace], Trace]) -> Trace:
    """A language model's, on a machine without a disk."""
    return without_disk(a_trace("gpt"))


def test_it_is_chosen_where_nothing_else_makes_a_budget_fit(trace: Trace, smallest_bytes: Callable[..., int]) -> None:
    without = smallest_bytes(trace)
    smallest = smallest_bytes(trace, allow=ALLOWED)
    assert smallest < without
    with pytest.raises(InfeasibleError, match="whose steps are all alike: --allow gradient-release"):
        plan(trace, budget=smallest * 9 // 10)
    found = plan(trace, budget=(smallest + without) // 2, allow=ALLOWED)
    (action,) = (action for action in found.actions if isinstance(action, GradientRelease))
    assert found.forecast.fits
    assert action.exactness == "bit-exact"
    assert any("steps parameters within backward" in line for line in found.forecast.binding)
    assert "gradients released within backward" in [lever.name for lever in found.forecast.levers]
    assert not any(technique_of(action).batch_parts(action) for action in found.actions)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_micro_batches": 2}, "several backwards add up"),
        ({"optimizer": "Muon + AdamW"}, "several optimizers step the model"),
        ({"optimizer": "LBFGS"}, "LBFGS is not known to step each parameter alone"),
        ({"autocast": "float16"}, "gradients of float16 are scaled back"),
        ({"device": "mps"}, "in CPU and CUDA memory only"),
    ],
)
def test_what_rules_it_out_is_said(trace: Trace, changed: dict[str, object], reason: str) -> None:
    assert TECHNIQUE.why_not(trace, ALLOWED) is None
    assert reason in (TECHNIQUE.why_not(msgspec.structs.replace(trace, **changed), ALLOWED) or "")


def test_what_the_recorded_step_does_rules_it_out_and_a_person_hears_of_it(
    trace: Trace, smallest_bytes: Callable[..., int]
) -> None:
    clipped = with_use(trace, GradientUse(reason="gradients are clipped", waiting=()))
    assert TECHNIQUE.why_not(with_use(trace, None), ALLOWED) is not None
    with pytest.raises(UsageError, match="--allow gradient-release: gradients are clipped"):
        plan(clipped, budget="1TiB", allow=ALLOWED)
    with pytest.raises(InfeasibleError) as raised:
        plan(clipped, budget=smallest_bytes(clipped) * 9 // 10)
    assert "gradient-release" not in str(raised.value)


def test_no_mode_has_it_and_any_may_have_it_beside() -> None:
    for mode in MODES:
        assert TECHNIQUE.allow not in allowed_words([mode])
        assert TECHNIQUE.allow in allowed_words([mode, *ALLOWED])


def test_what_the_run_rules_out_is_not_offered(trace: Trace) -> None:
    settings = Settings(budget_bytes=1 << 40, allow=ALLOWED)
    assert isinstance(TECHNIQUE.locations(SearchInputs(trace, settings), ()), tuple)
    here = msgspec.structs.replace(settings, not_here=(("gradient-release", "one of 2 processes"),))
    assert TECHNIQUE.locations(SearchInputs(trace, here), ()) == "one of 2 processes"


def test_gradients_that_wait_are_foreseen_in_memory(trace: Trace) -> None:
    def freed_bytes(use: GradientUse) -> int:
        settings = Settings(budget_bytes=1 << 40, allow=ALLOWED)
        offered = TECHNIQUE.locations(SearchInputs(with_use(trace, use), settings), ())
        assert isinstance(offered, tuple)
        return offered[0].actions[0].saved_bytes or 0

    step: Step = trace.steps[-1]
    largest_bytes = max(s.nbytes for s in step.storages if s.category == "gradient")
    waiting = GradientUse(reason="", waiting=(("embed.weight", largest_bytes),))
    assert freed_bytes(waiting) < freed_bytes(GradientUse(reason="", waiting=()))
