"""A file beside the last committed step of a run that ran out of memory: for how much to plan when it goes on."""

from pathlib import Path

import msgspec
from msgspec import Struct

from memwall.errors import OutOfMemoryError, StoreError, UsageError
from memwall.units import format_bytes
from memwall.versioned_files import NO_JSON, whole_file

MAX_ATTEMPTS = 3
"""How often a run is given another plan for the same reason: one that needs more holds something that no plan knows."""
_NAME = "out-of-memory.json"


class NextBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says for how much the next process of a run is to plan."""

    budget_bytes: int
    """The budget that was asked for."""
    within_bytes: int
    """The budget to plan for."""
    num_failures: int


def read_next_budget(directory: str | Path, budget_bytes: int | None) -> NextBudget | None:
    """Returns what the last process left, if it had the same budget.

    Raises:
        UsageError: the run has failed too often to go on by itself.
        StoreError: the file is damaged.
    """
    found = _left_in(directory)
    if found is None or found.budget_bytes != budget_bytes:
        return None
    if found.num_failures > MAX_ATTEMPTS:
        raise UsageError(
            f"--resume {directory}: the run has run out of memory {found.num_failures} times under a budget of "
            f"{format_bytes(found.budget_bytes)}, the last time with a plan for {format_bytes(found.within_bytes)} or "
            "more; resume with another --budget, or with a smaller batch"
        )
    return found


def note_failure(
    directory: str | Path, budget_bytes: int, failure: OutOfMemoryError, *, num_before: int, is_committed: bool = True
) -> OutOfMemoryError:
    """Leaves what follows from a failure in a training step; returns the same error, which says how to go on.

    Of ranks that fail together, the one with the least budget counts, and all are one failure.

    Args:
        directory: of the whole run, where `read_next_budget` looks on all ranks.
        num_before: failures before this process began, under the same budget.
        is_committed: whether there is a step to go on from.

    Raises:
        StoreError: the file cannot be read or written.
    """
    if not failure.next_budget_bytes:
        if not is_committed:
            return failure
        return _with_advice(failure, "go on from the last committed step by the same command with --resume")
    number, within_bytes, there = num_before + 1, failure.next_budget_bytes, _left_in(directory)
    if there is not None and (there.budget_bytes, there.num_failures) == (budget_bytes, number):
        within_bytes = min(within_bytes, there.within_bytes)
    left = NextBudget(budget_bytes=budget_bytes, within_bytes=within_bytes, num_failures=number)
    with whole_file(Path(directory) / _NAME, noun="budget of the next run", error=StoreError) as file:
        file.write(msgspec.json.encode(left))
    if number > MAX_ATTEMPTS:
        return failure
    return _with_advice(
        failure,
        "or go on from the last committed step: the same command with --resume plans for that, attempt "
        f"{number} of {MAX_ATTEMPTS}",
    )


def _with_advice(failure: OutOfMemoryError, advice: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"{failure}; {advice}",
        phase=failure.phase,
        asked_bytes=failure.asked_bytes,
        held_bytes=failure.held_bytes,
        next_budget_bytes=failure.next_budget_bytes,
    )


def _left_in(directory: str | Path) -> NextBudget | None:
    path = Path(directory) / _NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=NextBudget)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.ValidationError, *NO_JSON) as error:
        raise StoreError(f"{path} cannot be read ({error}); remove it to go on with the budget as it is") from error
