"""The smallest limit under which steps finish: bisection by hand, and trials that are killed or hang."""

from collections.abc import Callable

import gpu_caps
import pytest
from cap_search import Outcome, Trial, smallest_cap
from gpu_child import Budget, CaseFailed, CaseHung

MIB = 1 << 20
GIB = 1 << 30


def needs(num_bytes: int, otherwise: Outcome = "out of memory") -> tuple[list[int], Callable[[int], Trial]]:
    """A run that finishes with so much; and the limits that it was tried under."""
    asked: list[int] = []

    def attempt(limit_bytes: int) -> Trial:
        asked.append(limit_bytes)
        outcome: Outcome = "finished" if limit_bytes >= num_bytes else otherwise
        return Trial(limit_bytes=limit_bytes, outcome=outcome, seconds=1.0 if outcome == "finished" else 0.0)

    return asked, attempt


@pytest.mark.parametrize("otherwise", ["out of memory", "hung", "failed"])
@pytest.mark.parametrize("need", [300 * MIB, 301 * MIB + 7, 999 * MIB, 1000 * MIB])
def test_the_cap_is_found_to_one_percent(need: int, otherwise: Outcome) -> None:
    asked, attempt = needs(need, otherwise)
    cap = smallest_cap(attempt, floor_bytes=100 * MIB, ceiling_bytes=1000 * MIB)
    assert cap is not None
    assert cap.is_resolved
    assert cap.too_small_bytes < need <= cap.cap_bytes <= 1.01 * need
    assert asked[0] == 1000 * MIB
    assert len(asked) == len(set(asked)) == len(cap.trials) <= 10
    assert cap.step_seconds == 1.0


def test_of_a_large_one_to_32_mib() -> None:
    _, attempt = needs(50 * GIB)
    cap = smallest_cap(attempt, floor_bytes=GIB, ceiling_bytes=80 * GIB)
    assert cap is not None
    assert cap.cap_bytes - cap.too_small_bytes <= 32 * MIB


def test_a_run_that_never_finishes_has_no_cap() -> None:
    asked, attempt = needs(2 * GIB)
    assert smallest_cap(attempt, floor_bytes=0, ceiling_bytes=GIB) is None
    assert asked == [GIB, GIB * 11 // 10, GIB * 121 // 100]


def test_a_ceiling_that_chance_has_fail_is_raised() -> None:
    """GIVEN a run that took a little less when it was measured than it takes now THEN its cap is above that."""
    asked, attempt = needs(1010 * MIB)
    cap = smallest_cap(attempt, floor_bytes=0, ceiling_bytes=1000 * MIB)
    assert cap is not None
    assert cap.is_resolved
    assert 1010 * MIB <= cap.cap_bytes <= 1.01 * 1010 * MIB
    assert all(limit_bytes >= 1000 * MIB for limit_bytes in asked)


def test_without_time_the_interval_stays_wide_and_says_so() -> None:
    asked, attempt = needs(300 * MIB)
    cap = smallest_cap(attempt, floor_bytes=0, ceiling_bytes=GIB, is_time_over=lambda: len(asked) >= 2)
    assert cap is not None
    assert (cap.too_small_bytes, cap.cap_bytes, cap.is_resolved) == (0, 512 * MIB, False)


# -- on a device -------------------------------------------------------------------------------------------------------

CASE = ("gpt2", "float32", "adamw-fused")


def test_on_a_device_the_search_begins_between_what_was_live_and_what_was_reserved() -> None:
    asked = []

    def run(limit_bytes: int | None) -> dict[str, object]:
        asked.append(limit_bytes)
        if limit_bytes is not None and limit_bytes < 745 * MIB:
            return {"outcome": "out of memory"}
        held = {"requested_bytes": 700 * MIB, "allocated_bytes": 705 * MIB, "reserved_bytes": 900 * MIB}
        return {
            "outcome": "finished",
            **held,
            "process_bytes": GIB,
            "step_seconds": 0.5 if limit_bytes is None else 2.0,
        }

    row = gpu_caps.cap_row(CASE, run, lambda: False)
    assert asked[:2] == [None, 900 * MIB]
    assert 745 * MIB <= row["cap_bytes"] <= 752 * MIB
    assert row["slowdown"] == 4.0
    assert {trial["outcome"] for trial in row["trials"]} == {"finished", "out of memory"}
    assert all(700 * MIB <= trial["limit_bytes"] <= 900 * MIB for trial in row["trials"])
    assert row["unlimited"]["reserved_bytes"] == 900 * MIB


def test_a_trial_that_hangs_or_breaks_is_one_that_does_not_fit() -> None:
    def run(limit_bytes: int | None) -> dict[str, object]:
        if limit_bytes is not None and limit_bytes < 400 * MIB:
            raise CaseHung("no answer") if limit_bytes < 300 * MIB else CaseFailed("a status")
        held = {"requested_bytes": 100 * MIB, "allocated_bytes": 100 * MIB, "reserved_bytes": 800 * MIB}
        return {"outcome": "finished", **held, "process_bytes": GIB, "step_seconds": 1.0}

    row = gpu_caps.cap_row(CASE, run, lambda: False)
    assert 400 * MIB <= row["cap_bytes"] <= 404 * MIB
    assert {trial["outcome"] for trial in row["trials"]} == {"finished", "hung", "failed"}


def test_a_run_that_does_not_finish_without_a_limit_is_a_failure() -> None:
    with pytest.raises(CaseFailed, match="gpt2 float32 adamw-fused without a limit: out of memory"):
        gpu_caps.cap_row(CASE, lambda limit_bytes: {"outcome": "out of memory"}, lambda: False)


def held(num_bytes: int) -> dict[str, object]:
    """Returns what a run says that finished."""
    sizes = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes", "process_bytes"), num_bytes)
    return {"outcome": "finished", **sizes, "step_seconds": 1.0}


def test_a_case_whose_time_was_over_is_not_reached_and_not_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a child that still starts when the time is over THEN nothing is said of the limit that it was to run under.

    On an H100 a run was reported not to finish with what it had reserved: three trials of it had no time to start.
    """
    orders = []

    class Starting:
        def __init__(self, arguments: object) -> None: ...

        def answer(self, order: dict[str, object], timeout_s: float) -> dict[str, object]:
            orders.append(order["limit_bytes"])
            if order["limit_bytes"] is None:
                return {"measured": held(GIB)}
            raise CaseHung("no answer")

        def end(self) -> None: ...

    clock = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(gpu_caps, "Child", Starting)
    found = gpu_caps.measure_caps([CASE], lambda: 0, Budget(10, {}, lambda: next(clock, 11.0)))
    assert orders == [None, GIB]
    assert (found["failures"], found["not_reached"]) == ([], [" ".join(CASE)])


def test_a_search_that_is_cut_off_keeps_what_it_has_found() -> None:
    def run(limit_bytes: int | None) -> dict[str, object]:
        if limit_bytes is not None and limit_bytes < GIB:
            raise gpu_caps.OutOfTimeError("no answer")
        return held(GIB) | {"requested_bytes": 600 * MIB}

    row = gpu_caps.cap_row(CASE, run, lambda: False)
    assert (row["cap_bytes"], row["is_resolved"]) == (GIB, False)
    assert row["too_small_bytes"] < 600 * MIB


def test_a_run_that_does_not_finish_with_what_it_reserved_says_how_it_ended() -> None:
    def run(limit_bytes: int | None) -> dict[str, object]:
        return held(GIB) if limit_bytes is None else {"outcome": "out of memory"}

    with pytest.raises(CaseFailed, match=r"that it reserved: out of memory, out of memory, out of memory$"):
        gpu_caps.cap_row(CASE, run, lambda: False)
