"""Others' measured runs against memwall and the usual fits: tables from the rows of `prediction_runs.py`.

Every constant is fitted on the other families; margins are, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from prediction_metrics import (
    COVERAGE,
    Vector,
    linear_arm,
    margin_coverage,
    memory_saved_share,
    middle_difference,
    signed_errors,
    summary,
    verdicts,
)
from prediction_runs import DEVICE, Run

from memwall.predict.device import margin_bytes
from memwall.predict.hardware import hardware_named

_MIB = 1 << 20
_GB = 10**9
MEMWALL, THREE_TERMS = "memwall, context fitted", "fake, three terms"
DEVICES_GB = (8, 12, 16, 24, 40)
PROBES = ((8, 16), (16, 32))


def external_tables(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All figures of the external part.

    Args:
        recorded: what memwall said of each run, by key; runs without an answer are counted and left out everywhere.
    """
    answered = [run for run in runs if "live_bytes" in recorded.get(run.key, {})]
    ok = [run for run in answered if run.flag == "ok"]
    failures = {run.key: recorded[run.key]["failure"] for run in runs if "failure" in recorded.get(run.key, {})}
    return {
        "num_runs": len(runs),
        "num_answered": len(answered),
        "failures": failures,
        "ok": _arms(ok, recorded),
        "all": _arms(answered, recorded),
        "kinds": _kinds(ok, recorded),
        "probes": {f"{few}, {many}": _probes(ok, recorded, few, many) for few, many in PROBES},
        "margins": _margins(ok, recorded),
        "context_bytes": _context_bytes(ok, recorded),
    }


def _context_bytes(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> int:
    """What the card shows beside the allocator, fitted on all runs: for runs that are none of them."""
    rows = _Rows(runs, recorded)
    return round(middle_difference(rows.reserved, rows.true))


class _Rows:
    """Columns of some runs, in bytes."""

    def __init__(self, runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> None:
        self.families = [run.family for run in runs]
        self.ones = np.ones(len(runs))
        self.true = np.array([run.measured_gpu_mib * _MIB for run in runs], dtype=float)
        self.weights = np.array([4 * run.params for run in runs], dtype=float)
        self.fake = np.array([run.fake_peak_mib * _MIB for run in runs], dtype=float)
        self.live = np.array([recorded[run.key]["live_bytes"] for run in runs], dtype=float)
        self.reserved = np.array([recorded[run.key]["reserved_bytes"] for run in runs], dtype=float)

    def fitted(self, *features: Vector, base: Vector | None = None) -> Vector:
        return linear_arm(features, self.true, self.families, base)


ARMS: dict[str, Callable[[_Rows], Vector]] = {
    "fake, raw": lambda rows: rows.fake,
    "fake + constant": lambda rows: rows.fitted(rows.ones, base=rows.fake),
    "fake, affine": lambda rows: rows.fitted(rows.ones, rows.fake),
    THREE_TERMS: lambda rows: rows.fitted(rows.ones, rows.weights, rows.fake),
    "memwall's live bytes, affine": lambda rows: rows.fitted(rows.ones, rows.live),
    "memwall, context of the data file": lambda rows: rows.reserved + hardware_named(DEVICE).context_bytes[0],
    MEMWALL: lambda rows: rows.fitted(rows.ones, base=rows.reserved),
    "memwall, affine": lambda rows: rows.fitted(rows.ones, rows.reserved),
}
"""`fake` is the estimate published with the runs. All but the raw ones are fitted on the other families."""


def _arms(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = _Rows(runs, recorded)
    device_bytes = hardware_named(DEVICE).usable_bytes
    found = {}
    for name, arm in ARMS.items():
        predicted = arm(rows)
        coverage = margin_coverage(predicted, rows.true, rows.families)
        found[name] = summary(predicted, rows.true) | {
            "margin": coverage,
            "memory_saved_share": memory_saved_share(predicted, rows.true, device_bytes, coverage["margin"]),
            "verdicts": {
                str(size): verdicts(predicted, rows.true, size * _GB, coverage["margin"]) for size in DEVICES_GB
            },
        }
    return found


def _kinds(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = _Rows(runs, recorded)
    kinds = np.array([run.kind for run in runs])
    return {
        kind: {
            name: summary(ARMS[name](rows)[kinds == kind], rows.true[kinds == kind]) for name in (THREE_TERMS, MEMWALL)
        }
        for kind in sorted({run.kind for run in runs})
    }


def _probes(runs: Sequence[Run], recorded: dict[str, dict[str, Any]], few: int, many: int) -> dict[str, Any]:
    """Larger batches of models whose runs at two sizes are known: a line through them, or memwall from one of them."""
    known = {run.key: run for run in runs}
    asked = [
        run
        for run in runs
        if run.batch_size > many and f"{run.model}/{few}" in known and f"{run.model}/{many}" in known
    ]
    true = np.array([run.measured_gpu_mib * _MIB for run in asked], dtype=float)
    lines, from_few, from_many = [], [], []
    for run in asked:
        low, high = (known[f"{run.model}/{size}"].measured_gpu_mib * _MIB for size in (few, many))
        lines.append(high + (high - low) * (run.batch_size - many) / (many - few))
        for size, found, base in ((few, from_few, low), (many, from_many, high)):
            more = recorded[run.key]["reserved_bytes"] - recorded[f"{run.model}/{size}"]["reserved_bytes"]
            found.append(base + more)
    return {
        "two probes, linear": summary(lines, true),
        f"memwall after a step at {few}": summary(from_few, true),
        f"memwall after a step at {many}": summary(from_many, true),
    }


def _margins(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the margin that memwall ships with covers, nothing fitted."""
    rows = _Rows(runs, recorded)
    hardware = hardware_named(DEVICE)
    caps = np.array(
        [hardware.context_bytes[0] + size + margin_bytes(hardware, int(size)) for size in rows.reserved], dtype=float
    )
    return {
        "shipped_coverage": float((caps >= rows.true).mean()),
        "shipped_median_waste": float(np.median(signed_errors(caps, rows.true))),
        "wanted_coverage": COVERAGE,
    }
