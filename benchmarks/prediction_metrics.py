"""The arithmetic of `prediction.py`: errors, fits that leave a family out, margins and what they cover.

An error is signed, (predicted - true) / true; quantiles are of its magnitude. Whatever is
fitted for a row was fitted on the rows of other families.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MARGINS_PERCENT = (0, 1, 5, 10, 20)
COVERAGE = 0.95
"""Share of runs on other families that a margin is made to cover."""
_FEW_ROWS = 20
"""Below this a cell shows rows, no percentages."""


def signed_errors(predicted: Sequence[float], true: Sequence[float]) -> Vector:
    """Relative errors [rows]; negative where the prediction is too low."""
    truth = np.asarray(true, dtype=float)
    return (np.asarray(predicted, dtype=float) - truth) / truth


def false_fit_share(predicted: Sequence[float], true: Sequence[float], margin: float) -> float:
    """Share of rows that would run out of memory with a cap at the prediction and this relative margin."""
    return float((np.asarray(predicted, dtype=float) * (1 + margin) < np.asarray(true, dtype=float)).mean())


def summary(predicted: Sequence[float], true: Sequence[float]) -> dict[str, Any]:
    """The figures of one arm over its rows; under 20 rows the errors themselves."""
    if not len(true):
        return {"num_rows": 0}
    errors = signed_errors(predicted, true)
    magnitude = np.abs(errors)
    found: dict[str, Any] = {"num_rows": len(errors), "worst": float(errors[magnitude.argmax()])}
    if len(errors) < _FEW_ROWS:
        return found | {"errors": [float(error) for error in errors]}
    waste = np.asarray(predicted, dtype=float) - np.asarray(true, dtype=float)
    return found | {
        "median": float(np.median(magnitude)),
        "mean": float(magnitude.mean()),
        "p90": float(np.quantile(magnitude, 0.9)),
        "p95": float(np.quantile(magnitude, 0.95)),
        "bias": float(np.median(errors)),
        "under_share": float((errors < 0).mean()),
        "within_10_percent_share": float((magnitude <= 0.1).mean()),
        "false_fits": {str(m): false_fit_share(predicted, true, m / 100) for m in MARGINS_PERCENT},
        "median_waste_bytes": float(np.median(waste[waste >= 0])) if (waste >= 0).any() else None,
    }


def memory_saved_share(predicted: Sequence[float], true: Sequence[float], device_bytes: float, margin: float) -> float:
    """xMem's third metric: what a cap at the prediction leaves of a device to others, 0 for a run that it kills."""
    caps = np.minimum(np.asarray(predicted, dtype=float) * (1 + margin), device_bytes)
    saved = np.where(caps >= np.asarray(true, dtype=float), device_bytes - caps, 0.0)
    return float(saved.mean() / device_bytes)


def against_margin(
    predicted: Sequence[float], true: Sequence[float], families: Sequence[str], device_bytes: float
) -> dict[str, Any]:
    """The margin of an arm, and the share of a device that caps at its predictions with that margin leave to others.

    Nothing where there is but one family, so that no margin can be made without it.
    """
    if len(set(families)) < 2:
        return {}
    coverage = margin_coverage(predicted, true, families)
    saved = memory_saved_share(predicted, true, device_bytes, coverage["margin"])
    return {"margin": coverage, "memory_saved_share": saved}


def verdicts(predicted: Sequence[float], true: Sequence[float], device_bytes: float, margin: float) -> dict[str, int]:
    """How often "fits" and "does not fit" were said and true, on a device of this size."""
    says_fit = np.asarray(predicted, dtype=float) * (1 + margin) <= device_bytes
    fits = np.asarray(true, dtype=float) <= device_bytes
    return {
        "fits_said_fits": int((fits & says_fit).sum()),
        "fits_said_not": int((fits & ~says_fit).sum()),
        "not_said_fits": int((~fits & says_fit).sum()),
        "not_said_not": int((~fits & ~says_fit).sum()),
    }


# -- what is fitted ----------------------------------------------------------------------------------------------------


def left_out(
    families: Sequence[str], fit: Callable[[NDArray[np.bool_]], Callable[[NDArray[np.bool_]], Vector]]
) -> Vector:
    """Predictions [rows], those of each family by a fit that has not seen it.

    Args:
        fit: given the rows to learn from as a mask, returns a function from a mask of rows to their predictions.
    """
    names = np.asarray(families)
    if len(set(families)) < 2:
        raise ValueError("leaving a family out takes at least two; run more of the list")
    predictions = np.empty(len(names))
    for name in dict.fromkeys(families):
        own = names == name
        predictions[own] = fit(~own)(own)
    return predictions


def linear_fit(features: Sequence[Sequence[float]], base: Vector, true: Vector, rows: NDArray[np.bool_]) -> Vector:
    """Coefficients of the features, given as columns, that added to `base` minimise the mean relative error of rows.

    By least squares, reweighted until they are least absolute differences.
    """
    truth = true[rows]
    relative = np.column_stack([np.asarray(column, dtype=float)[rows] for column in features]) / truth[:, None]
    missing = (truth - base[rows]) / truth
    weights = np.ones(len(truth))
    coefficients = np.zeros(len(features))
    for _ in range(100):
        coefficients = np.linalg.lstsq(relative * weights[:, None], missing * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(relative @ coefficients - missing), 1e-6))
    return coefficients


def linear_arm(
    features: Sequence[Sequence[float]],
    true: Sequence[float],
    families: Sequence[str],
    base: Sequence[float] | None = None,
) -> Vector:
    """Predictions by a linear fit of the other families; `base` is added as it is, with a coefficient of one."""
    columns = np.column_stack([np.asarray(column, dtype=float) for column in features])
    start = np.zeros(len(true)) if base is None else np.asarray(base, dtype=float)
    truth = np.asarray(true, dtype=float)

    def fit(rows: NDArray[np.bool_]) -> Callable[[NDArray[np.bool_]], Vector]:
        if base is not None and len(features) == 1:  # a constant
            coefficients = np.array([middle_difference(start[rows], truth[rows])])
        else:
            coefficients = linear_fit(features, start, truth, rows)
        return lambda asked: start[asked] + columns[asked] @ coefficients

    return left_out(families, fit)


def middle_difference(base: Vector, true: Vector) -> float:
    """The constant that makes `base` least wrong: the median difference, each row weighted by 1 / true."""
    order = np.argsort(true - base)
    weights = np.cumsum(1 / true[order])
    return float((true - base)[order][np.searchsorted(weights, weights[-1] / 2)])


def calibrated_margin(predicted: Sequence[float], true: Sequence[float], coverage: float = COVERAGE) -> float:
    """The relative margin that covers so many of these rows and, if they are exchangeable with them, others.

    Split conformal prediction: the ceil((n + 1) * coverage)-th smallest of true / predicted - 1, at least 0.
    """
    short = np.sort(np.asarray(true, dtype=float) / np.asarray(predicted, dtype=float) - 1)
    place = int(np.ceil((len(short) + 1) * coverage)) - 1
    return max(0.0, float(short[min(place, len(short) - 1)]))


def covering_shares(
    features: tuple[Vector, Vector], base: Vector, true: Vector, coverage: float = COVERAGE
) -> tuple[float, float]:
    """The shares of two features, non-negative, that added to `base` cover so many rows and add least in the mean.

    The first is tried in steps of a hundredth up to one; each leaves one smallest second.
    """
    wide, narrow = features
    found = []
    for first in np.arange(0.0, 1.0, 0.01):
        lacking = true - base - first * wide
        # A row that nothing can help asks for a share without end.
        asked = np.where(
            lacking <= 0, 0.0, np.divide(lacking, narrow, out=np.full_like(narrow, np.inf), where=narrow > 0)
        )
        second = float(np.quantile(asked, coverage, method="inverted_cdf"))
        if np.isfinite(second):
            found.append((float(((first * wide + second * narrow) / true).mean()), float(first), second))
    if not found:
        raise ValueError(f"no shares of these features cover {coverage:.0%} of the rows")
    return min(found)[1:]


def margin_coverage(
    predicted: Sequence[float], true: Sequence[float], families: Sequence[str], coverage: float = COVERAGE
) -> dict[str, float]:
    """The margin over all rows, and what the margins made without a family cover in that family."""
    guess, truth = np.asarray(predicted, dtype=float), np.asarray(true, dtype=float)
    caps = left_out(
        families,
        lambda rows: lambda asked: guess[asked] * (1 + calibrated_margin(guess[rows], truth[rows], coverage)),
    )
    by_family = [float((caps >= truth)[np.asarray(families) == name].mean()) for name in dict.fromkeys(families)]
    return {
        "wanted_coverage": coverage,
        "margin": calibrated_margin(predicted, true, coverage),
        "measured_coverage": float((caps >= truth).mean()),
        "lowest_family_coverage": min(by_family),
    }
