"""The part of `gpu_truth.py` that records allocator histories and has the simulated allocator repeat them."""

import sys
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from allocator_record import PEAKS, AllocatorRecord, first_difference, load_records, peak_differences
from gpu_child import Budget, CaseFailed, Child, prepared

__all__ = ["compared", "record_histories"]

_MOST_SECONDS = 90.0


def record_histories(runs: Sequence[tuple[str, str]], folder: Path, snapshots: Path, budget: Budget) -> dict[str, Any]:
    """Records every one of these runs that there is time for, and compares; what was not reached is named.

    Args:
        runs: programs and settings of torch's allocator.
        folder: for the records, below tests/golden.
        snapshots: for the snapshots that they were made from.
    """

    def start(run: tuple[str, str]) -> Child:
        program, settings = run
        return Child(("gpu_record_case.py", program, str(folder), str(snapshots)), settings)

    for path in folder.glob("*.json.zst") if runs else ():
        path.unlink()  # An earlier call's: records of two releases or devices are not mixed.
    failures, reached = [], set()
    for run, child in prepared(runs, start):
        if not budget.seconds:
            child.end()
            break
        reached.add(run)
        try:
            print(child.answer({}, min(_MOST_SECONDS, budget.seconds + 10)), flush=True)
        except CaseFailed as error:
            failures.append(f"history of {' '.join(run).strip()} failed")
            print(error, file=sys.stderr, flush=True)
    not_reached = [" ".join(run).strip() for run in runs if run not in reached]
    return compared(load_records(folder)) | {"failures": failures, "not_reached": not_reached}


def compared(
    records: dict[str, AllocatorRecord],
    l1: Callable[[AllocatorRecord], str | None] = first_difference,
    l2: Callable[[AllocatorRecord, AllocatorRecord], list[str]] = peak_differences,
) -> dict[str, Any]:
    """L1 of each record; L2 of the run under default settings against each run of its program under others."""
    return {
        "l1": [
            {
                "name": name,
                "settings": record.settings,
                "num_events": len(record.events),
                "difference": _found(l1, record),
                **{key: record.statistics[f"{key}.all.peak"] for key in PEAKS},
            }
            for name, record in records.items()
        ],
        "l2": [
            {"name": name, "under": other.settings, "differences": _found(l2, record, other)}
            for (name, record), (_, other) in permutations(records.items(), 2)
            if record.program == other.program and not record.settings
        ],
    }


def _found(compare: Callable[..., Any], *records: AllocatorRecord) -> Any:
    """What a comparison says, or how it broke: the device is lent for minutes, and what it gave is kept."""
    try:
        return compare(*records)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return text if len(records) == 1 else [text]
