"""Others' measured runs against memwall and the usual fits: tables from the rows of `prediction_runs.py`.

Every constant is fitted on the other families; margins are, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prediction_metrics import (
    Vector,
    against_margin,
    covering_shares,
    left_out,
    linear_arm,
    middle_difference,
    signed_errors,
    summary,
    verdicts,
)
from prediction_runs import DEVICE, Run

from memwall.machine.hardware import hardware_named
from memwall.predict.device import margin_bytes

_MIB = 1 << 20
_GB = 10**9
MEMWALL, THREE_TERMS = "memwall, context fitted", "fake, three terms"
TWO_PROBES, AFTER_A_STEP = "two probes, linear", "memwall after a step at"
ONE_PROBE = "one probe + difference of fake"
DEVICES_GB = (8, 12, 16, 24, 40)
"""Sizes of devices that a verdict is asked for, one that holds every run among them."""
PROBES = ((8, 16), (16, 32))
DEFAULT_COVERAGE = 0.96
"""What the default margin is made to cover: for 97 %, too, room for convolutions would have to double."""


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
        "one_probe": {str(few): _one_probe(ok, recorded, few) for few in sorted({few for few, _ in PROBES})},
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
        self.convolution = np.array([recorded[run.key]["convolution_bytes"] for run in runs], dtype=float)

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
    "memwall, context and convolutions fitted": lambda rows: rows.fitted(
        rows.ones, rows.convolution, base=rows.reserved
    ),
}
"""`fake` is the estimate published with the runs. All but the raw ones are fitted on the other families."""


def _arms(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = _Rows(runs, recorded)
    device_bytes = hardware_named(DEVICE).usable_bytes
    found = {}
    for name, arm in ARMS.items():
        predicted = arm(rows)
        figures = against_margin(predicted, rows.true, rows.families, device_bytes)
        margin = figures["margin"]["margin"]
        found[name] = (
            summary(predicted, rows.true)
            | figures
            | {"verdicts": {str(size): verdicts(predicted, rows.true, size * _GB, margin) for size in DEVICES_GB}}
        )
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
    lines, from_few, from_many = [], [], []
    for run in asked:
        low, high = (known[f"{run.model}/{size}"].measured_gpu_mib * _MIB for size in (few, many))
        lines.append(high + (high - low) * (run.batch_size - many) / (many - few))
        for size, found, base in ((few, from_few, low), (many, from_many, high)):
            more = recorded[run.key]["reserved_bytes"] - recorded[f"{run.model}/{size}"]["reserved_bytes"]
            found.append(base + more)
    return _against(asked, {TWO_PROBES: lines, f"{AFTER_A_STEP} {few}": from_few, f"{AFTER_A_STEP} {many}": from_many})


def _one_probe(runs: Sequence[Run], recorded: dict[str, dict[str, Any]], few: int) -> dict[str, Any]:
    """Larger batches of models whose run at one size is known: what the estimates say that they need more."""
    known = {run.key: run for run in runs}
    asked = [run for run in runs if run.batch_size > few and f"{run.model}/{few}" in known]
    arms: dict[str, list[float]] = {ONE_PROBE: [], f"{AFTER_A_STEP} {few}": []}
    for run in asked:
        probe = known[f"{run.model}/{few}"]
        ours = recorded[run.key]["reserved_bytes"] - recorded[probe.key]["reserved_bytes"]
        fake = (run.fake_peak_mib - probe.fake_peak_mib) * _MIB
        for found, more in zip(arms.values(), (fake, ours), strict=True):
            found.append(probe.measured_gpu_mib * _MIB + more)
    return _against(asked, arms)


def _against(asked: Sequence[Run], arms: dict[str, list[float]]) -> dict[str, Any]:
    true = [float(run.measured_gpu_mib * _MIB) for run in asked]
    families, device_bytes = [run.family for run in asked], hardware_named(DEVICE).usable_bytes
    return {
        name: summary(predicted, true) | against_margin(predicted, true, families, device_bytes)
        for name, predicted in arms.items()
    }


def _margins(runs: Sequence[Run], recorded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The default margin: its shares as fitted on all runs, what they cover, and what those of other families do."""
    rows, kinds = _Rows(runs, recorded), np.array([run.kind for run in runs])
    hardware = hardware_named(DEVICE)
    reserved = rows.reserved + hardware.context_bytes[1]
    shipped = rows.reserved + [
        hardware.context_bytes[0] + margin_bytes(hardware, int(size), int(largest))
        for size, largest in zip(rows.reserved, rows.convolution, strict=True)
    ]

    def fit(known: NDArray[np.bool_]) -> Callable[[NDArray[np.bool_]], Vector]:
        shares = covering_shares(
            (rows.reserved[known], rows.convolution[known]), reserved[known], rows.true[known], DEFAULT_COVERAGE
        )
        return lambda asked: reserved[asked] + shares[0] * rows.reserved[asked] + shares[1] * rows.convolution[asked]

    def by_kind(covered: NDArray[np.bool_]) -> dict[str, float]:
        return {str(kind): float(covered[kinds == kind].mean()) for kind in sorted(set(kinds))}

    fitted = left_out(rows.families, fit)
    return {
        "shipped_coverage": float((shipped >= rows.true).mean()),
        "shipped_coverage_by_kind": by_kind(shipped >= rows.true),
        "shipped_median_waste": float(np.median(signed_errors(shipped, rows.true))),
        "fitted_shares": covering_shares((rows.reserved, rows.convolution), reserved, rows.true, DEFAULT_COVERAGE),
        "fitted_coverage": float((fitted >= rows.true).mean()),
        "fitted_coverage_by_kind": by_kind(fitted >= rows.true),
        "fitted_verdicts": {str(size): verdicts(fitted, rows.true, size * _GB, 0.0) for size in DEVICES_GB},
        "wanted_coverage": DEFAULT_COVERAGE,
    }
