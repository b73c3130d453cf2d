"""Moments in 8 bits: where the user allowed it, and only where the step is shorter for it or nothing else fits."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from located import inputs, low_bits
from plans import on_machine

from memwall.errors import InfeasibleError
from memwall.machine.hardware import hardware_named
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan, plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.techniques import low_bit_state
from memwall.planning.techniques.low_bit_state import LIBRARY_BYTES, TECHNIQUE, LowBitState
from memwall.predict.cuda.translate import translated
from memwall.predict.curve import live_peak_bytes
from memwall.predict.low_bit_moments import low_bit_bytes, low_bit_elements
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

ALLOWED = ("low-bit-optimizer",)
pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


@pytest.fixture(autouse=True)
def torchao_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit_state, "find_spec", lambda _: object())
    monkeypatch.setattr(low_bit_state, "LIBRARY_BYTES", 0)


@pytest.fixture
def diskless(a_trace: Callable[[str], Trace], without_disk: Callable[[Trace], Trace]) -> Trace:
    """A GPT under AdamW, on a machine without a disk."""
    return without_disk(a_trace("gpt"))


def least_budget(trace: Trace, *allow: str) -> int:
    try:
        make_plan(trace, Settings(budget_bytes=1 << 20, allow=allow))
    except InfeasibleError as error:
        return error.smallest_feasible_bytes
    raise AssertionError("a plan for a MiB")


def is_low(found: Plan) -> bool:
    return any(isinstance(action, LowBitState) for action in found.actions)


def test_a_budget_that_nothing_else_meets_is_met_where_it_is_allowed(diskless: Trace, tmp_path: Path) -> None:
    freed_bytes = low_bits(diskless, steady_step(diskless)).saved_bytes or 0
    least, without = least_budget(diskless, *ALLOWED), least_budget(diskless)
    assert without - least > 0.5 * freed_bytes > 0
    budget_bytes = (least + without) // 2
    with pytest.raises(InfeasibleError, match="moments in 8 bits, which changes numerics: --allow low-bit-optimizer"):
        plan(diskless, budget=budget_bytes)
    found = plan(diskless, budget=budget_bytes, allow=ALLOWED)
    (action,) = [a for a in found.actions if isinstance(a, LowBitState)]
    assert (action.saved_bytes, action.exactness) == (freed_bytes, "changes-numerics")
    forecast = found.forecast
    assert forecast.peak.process_bytes + forecast.margin_bytes <= budget_bytes
    assert forecast.peak.allocated_bytes == live_peak_bytes(step_under_plan(diskless, found), "cpu")
    assert (forecast.step_seconds or 0.0) >= (forecast.plain_step_seconds or 0.0) + (action.cost_seconds or 0.0)
    assert forecast.moved_bytes_per_step == 0
    assert any("the optimizer's moments are in 8 bits between steps" in reason for reason in forecast.binding)
    assert "optimizer state in 8 bits, lossy" in [lever.name for lever in forecast.levers]
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_digits_are_not_lost_where_there_is_room_or_a_fast_disk(
    a_trace: Callable[[str], Trace], diskless: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit_state, "_SECONDS_PER_ELEMENT", 1e-6)
    fast = on_machine(a_trace("gpt"), read_bytes_per_second=1e12, write_bytes_per_second=1e12)
    for trace, budget_bytes in ((diskless, 1 << 40), (fast, least_budget(diskless) - 1)):
        allowed = plan(trace, budget=budget_bytes, allow=ALLOWED)
        assert not is_low(allowed)
        assert allowed.actions == plan(trace, budget=budget_bytes).actions


@pytest.mark.slow
def test_they_are_where_the_disk_is_slow(a_trace: Callable[[str], Trace], diskless: Trace) -> None:
    budget_bytes = (least_budget(diskless) + least_budget(diskless, *ALLOWED)) // 2
    slow = on_machine(a_trace("gpt"), read_bytes_per_second=1e7, write_bytes_per_second=1e7)
    exact, low = (plan(slow, budget=budget_bytes, allow=allow) for allow in ((), ALLOWED))
    assert is_low(low)
    assert 1.05 * (low.forecast.step_seconds or 0.0) < (exact.forecast.step_seconds or 0.0)


def test_what_importing_torchao_takes_is_foreseen_once(diskless: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit_state, "LIBRARY_BYTES", LIBRARY_BYTES)
    budget_bytes = least_budget(diskless, *ALLOWED)
    settings = Settings(budget_bytes=budget_bytes, allow=ALLOWED)
    new = make_plan(diskless, settings).forecast
    loaded = make_plan(diskless, msgspec.structs.replace(settings, is_torchao_loaded=True)).forecast
    smallest = [forecast.smallest_feasible_budget_bytes or 0 for forecast in (new, loaded)]
    assert smallest[0] - smallest[1] >= LIBRARY_BYTES


def test_what_it_frees_and_costs(diskless: Trace) -> None:
    step = steady_step(diskless)
    action, elements = low_bits(diskless, step), low_bit_elements(step)
    assert action.saved_bytes == sum(4 * number - low_bit_bytes(number) for number in elements)
    for num_threads in (1, 2):  # the trace has those of the moment, which another test may have set
        action = low_bits(msgspec.structs.replace(diskless, num_threads=num_threads), step)
        assert action.cost_seconds == pytest.approx(sum(elements) * 40e-9 / num_threads)


def test_on_a_cuda_device_their_seconds_are_passes_at_the_cards_bandwidth(a_trace: Callable[[str], Trace]) -> None:
    """GIVEN a step for a card WHEN its link is slow THEN moments are in 8 bits there; no library counts."""
    slow = msgspec.structs.replace(hardware_named("a100-80gb"), host_link_bytes_per_second=1e8)
    trace = translated(a_trace("gpt"), slow)
    assert TECHNIQUE.why_not(trace, ALLOWED) is None
    step = steady_step(trace)
    action, elements = low_bits(trace, step), low_bit_elements(step)
    assert action.saved_bytes == sum(4 * number - low_bit_bytes(number) for number in elements)
    assert action.cost_seconds == pytest.approx(sum(elements) * 117 / slow.memory_bytes_per_second, rel=0.05)
    (location,) = TECHNIQUE.locations(inputs(trace, allow=ALLOWED), ())
    assert location.grown_bytes == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "mps"}, "in CPU and CUDA memory only; the step is for 'mps'"),
        ({"optimizer": "SGD"}, "only moments of Adam and AdamW are kept in 8 bits; SGD steps"),
        ({"optimizer": "Muon + AdamW"}, "Muon + AdamW steps"),
    ],
    ids=["device", "SGD", "several"],
)
def test_why_not(diskless: Trace, change: dict[str, str], words: str) -> None:
    assert TECHNIQUE.why_not(diskless, ALLOWED) is None
    trace = msgspec.structs.replace(diskless, **change)
    reason = TECHNIQUE.why_not(trace, ALLOWED) or ""
    assert words in reason


def test_it_is_opt_in_and_needs_torchao_and_moments(diskless: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "allow it with --allow low-bit-optimizer" in (TECHNIQUE.why_not(diskless, ("precision",)) or "")
    with monkeypatch.context() as patch:
        patch.setattr(low_bit_state, "low_bit_elements", lambda _: ())
        assert "has no moment in float32 of 4,096 elements" in (TECHNIQUE.why_not(diskless, ALLOWED) or "")
    monkeypatch.setattr(low_bit_state, "find_spec", lambda _: None)
    assert "not installed: pip install torchao" in (TECHNIQUE.why_not(diskless, ALLOWED) or "")
