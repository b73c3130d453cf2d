"""The zoo's figures: every arm on the same cases, from the rows of `prediction_case.py`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from prediction_metrics import COVERAGE, against_margin, linear_arm, signed_errors, summary

AFFINE = "MemTracker, affine"
_PHASES = ("first", "steady")


def truth_tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures of the CPU part: arms at the peak of two steps, memwall by phase, family, optimizer and precision.

    Memory is saved on a device that is as large as the largest case needs.
    """
    peaks = [max(row["measured"].values()) for row in rows]
    ours = [max(row["memwall"][f"{phase}_bytes"] for phase in _PHASES) for row in rows]
    families = [row["family"] for row in rows]
    device_bytes = max(peaks)
    arms = {"memwall": _figures(ours, peaks, families, device_bytes)}
    for name in rows[0]["arms_bytes"]:
        arms[name] = _partial(rows, name, device_bytes)
        if name == "MemTracker":
            arms[AFFINE] = _affine(rows, name, device_bytes)
    return {
        "num_cases": len(rows),
        "wanted_coverage": COVERAGE,
        "arms": arms,
        "device_bytes": device_bytes,
        "phases": {
            phase: _figures(
                [row["memwall"][f"{phase}_bytes"] for row in rows],
                [row["measured"][f"{phase}_bytes"] for row in rows],
                families,
                device_bytes,
            )
            for phase in _PHASES
        },
        "worst": {key: _worst_by(rows, ours, peaks, key) for key in ("family", "optimizer", "precision")},
        "record_seconds_median": float(np.median([row["memwall"]["seconds"] for row in rows])),
    }


def _figures(
    predicted: Sequence[float], true: Sequence[float], families: Sequence[str], device_bytes: float
) -> dict[str, Any]:
    return summary(predicted, true) | against_margin(predicted, true, families, device_bytes)


def _partial(rows: Sequence[dict[str, Any]], name: str, device_bytes: float) -> dict[str, Any]:
    """An arm over the cases that it answers; how many it does not, and why."""
    answered = [row for row in rows if row["arms_bytes"][name] is not None]
    silent = [row for row in rows if row["arms_bytes"][name] is None]
    found: dict[str, Any] = {"num_rows": 0}
    if answered:
        predicted = [row["arms_bytes"][name] for row in answered]
        true = [max(row["measured"].values()) for row in answered]
        found = _figures(predicted, true, [row["family"] for row in answered], device_bytes)
    if silent:
        found["no_answer"] = len(silent)
        found["reasons"] = sorted({row["no_answer"].get(name, "") for row in silent})
    return found


def _affine(rows: Sequence[dict[str, Any]], name: str, device_bytes: float) -> dict[str, Any]:
    answered = [row for row in rows if row["arms_bytes"][name] is not None]
    families = [row["family"] for row in answered]
    if len(set(families)) < 2:
        return {"num_rows": 0}
    true = [float(max(row["measured"].values())) for row in answered]
    base = [float(row["arms_bytes"][name]) for row in answered]
    predicted = [float(value) for value in linear_arm(([1.0] * len(true), base), true, families)]
    return _figures(predicted, true, families, device_bytes) | {"no_answer": len(rows) - len(answered)}


def _worst_by(
    rows: Sequence[dict[str, Any]], ours: Sequence[float], peaks: Sequence[float], key: str
) -> dict[str, float]:
    """The largest signed error in each group."""
    errors = signed_errors(ours, peaks)
    found: dict[str, float] = {}
    for row, error in zip(rows, errors, strict=True):
        if abs(error) >= abs(found.get(row[key], 0.0)):
            found[row[key]] = float(error)
    return found
