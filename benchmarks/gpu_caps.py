"""The part of `gpu_truth.py` that measures caps: the least that a process may reserve and still finish its steps.

`set_per_process_memory_fraction` limits what torch's allocator reserves; what the process holds beside it comes on top.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any

import msgspec
from cap_search import Outcome, Trial, smallest_cap
from gpu_child import Budget, CaseFailed, CaseHung, Child, prepared

__all__ = ["CAP_CASES", "measure_caps"]

Case = tuple[str, str, str]
CAP_CASES: tuple[Case, ...] = (
    ("gpt2", "autocast-bfloat16", "adamw-foreach"),
    ("resnet", "float32", "sgd-momentum"),
    ("t5", "bfloat16", "adamw-fused"),
)
_MOST_SECONDS = 60.0


class OutOfTimeError(CaseFailed):
    """A trial was ended since the time of its part was over, which says nothing of the trial."""


def measure_caps(
    cases: Sequence[Case], used_bytes: Callable[[], int], budget: Budget, *, is_tiny: bool = False
) -> dict[str, Any]:
    """Caps of these cases that there is time for; with `is_tiny`, no search follows the first trial."""
    rows, failures, not_reached = [], [], []
    for case in cases:
        if not budget.seconds:
            not_reached.append(" ".join(case))
            continue
        try:
            with closing(_Trials(case, used_bytes, budget)) as trials:
                rows.append(cap_row(case, trials.run, lambda: is_tiny or not budget.seconds))
            print(rows[-1], flush=True)
        except OutOfTimeError:
            not_reached.append(" ".join(case))
        except CaseFailed as error:
            failures.append(f"cap of {' '.join(case)} failed")
            print(error, file=sys.stderr, flush=True)
    return {"rows": rows, "failures": failures, "not_reached": not_reached}


class _Trials:
    """Runs of one case: all are the same process until they are told their limit, so the next ones start meanwhile."""

    def __init__(self, case: Case, used_bytes: Callable[[], int], budget: Budget) -> None:
        self._children = prepared(repeat(("gpu_truth_case.py", *case)), Child, width=2)
        self._used_bytes = used_bytes
        self._budget = budget

    def run(self, limit_bytes: int | None) -> dict[str, Any]:
        """Returns what a fresh process measured under a limit.

        Raises:
            OutOfTimeError: it had no answer when the time was over, of which it may have taken most to start.
        """
        _, child = next(self._children)
        order = {"used_bytes": self._used_bytes(), "limit_bytes": limit_bytes}
        try:
            answer = child.answer(order, min(_MOST_SECONDS, self._budget.seconds + 10))
        except CaseHung as error:
            if not self._budget.seconds:
                raise OutOfTimeError(str(error)) from None
            raise
        measured: dict[str, Any] = answer["measured"]
        return measured

    def close(self) -> None:
        """Ends the processes that nobody asked for."""
        self._children.close()


def cap_row(
    case: Case, run: Callable[[int | None], dict[str, Any]], is_time_over: Callable[[], bool]
) -> dict[str, Any]:
    """A run without a limit, then the smallest limit: above what it requested at most, up to what it reserved.

    Raises:
        CaseFailed: the run without a limit did not finish, or not even with all that it reserved then.
        OutOfTimeError: none finished under a limit before the time was over.
    """
    outcomes: list[Outcome] = []

    free = run(None)
    if free["outcome"] != "finished":
        raise CaseFailed(f"{' '.join(case)} without a limit: {free['outcome']}")

    def attempt(limit_bytes: int) -> Trial:
        seconds = 0.0
        try:
            found = run(limit_bytes)
            outcome, seconds = found["outcome"], found.get("step_seconds", 0.0)
        except OutOfTimeError:
            outcome = "cut off"
        except CaseHung:
            outcome = "hung"
        except CaseFailed as error:
            print(error, file=sys.stderr, flush=True)
            outcome = "failed"
        outcomes.append(outcome)
        return Trial(limit_bytes=limit_bytes, outcome=outcome, seconds=seconds)

    # Whatever is live at once must be reserved: a byte less than that cannot do.
    cap = smallest_cap(
        attempt,
        floor_bytes=free["requested_bytes"] - 1,
        ceiling_bytes=free["reserved_bytes"],
        is_time_over=is_time_over,
    )
    if cap is None:
        if outcomes[-1] == "cut off":
            raise OutOfTimeError(f"{' '.join(case)}: its time was over before it finished under a limit")
        reserved_bytes = free["reserved_bytes"]
        raise CaseFailed(
            f"{' '.join(case)} does not finish with the {reserved_bytes} bytes that it reserved: {', '.join(outcomes)}"
        )
    return {
        **dict(zip(("family", "precision", "optimizer"), case, strict=True)),
        "quantity": "reserved bytes",
        "unlimited": {
            key: free[key]
            for key in ("requested_bytes", "allocated_bytes", "reserved_bytes", "process_bytes", "step_seconds")
        },
        **msgspec.to_builtins(cap),
        "slowdown": cap.step_seconds / free["step_seconds"],
    }
