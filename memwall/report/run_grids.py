"""Prediction beside measurement, and one run beside another, as tables."""

import math
from collections.abc import Sequence

from msgspec import Struct

from memwall.observe.run_report import RunReport
from memwall.report.grid import DASH, Grid, bytes_or_dash, error_percent, ratio_text, seconds_or_dash
from memwall.units import format_bytes, format_seconds

__all__ = [
    "Outcome",
    "comparison_grid",
    "loss_difference",
    "measured_steady_bytes",
    "outside_steps_bytes",
    "overall_process_bytes",
    "run_grid",
    "steady_process_bytes",
    "time_findings",
    "unexplained_bytes",
]


# How far a step may lie outside the bounds that its forecast gave: its time is that noisy where both are right.
_SHORTER, _LONGER = 0.95, 1.1
_LEAST_STEPS = 5


class Outcome(Struct, frozen=True, kw_only=True):
    """One run of a comparison."""

    name: str
    """E.g. "free run" or "under the plan"."""
    peak_predicted_bytes: int | None = None
    """Process bytes of a steady step."""
    peak_measured_bytes: int | None = None
    step_seconds: float | None = None
    losses: tuple[float, ...] = ()
    """Loss of every step, in order."""
    actions: str = "none"
    """What was done, in a few words."""


def steady_process_bytes(report: RunReport) -> int:
    """Predicted process peak of what was measured: the steady step where the forecast names it, else its maximum."""
    return report.forecast.steady_process_bytes


def overall_process_bytes(report: RunReport) -> int:
    """Highest measured process peak of what has to keep to the budget."""
    return max(report.measured.peak.process_bytes, _judged_first_bytes(report))


def measured_steady_bytes(report: RunReport) -> int:
    """Measured process peak of the steps under the plan; of the whole run where the report names no other."""
    return report.measured.steady_peak_bytes or report.measured.peak.process_bytes


def outside_steps_bytes(report: RunReport) -> int | None:
    """Measured process peak between and after the steps, where it is the run's highest: no forecast is about it."""
    overall_bytes, first_bytes = report.measured.peak.process_bytes, _judged_first_bytes(report)
    return overall_bytes if overall_bytes > max(measured_steady_bytes(report), first_bytes) else None


def _judged_first_bytes(report: RunReport) -> int:
    """The recorded first step's peak; 0 on a CUDA device, where it has all optimizer state in it by design."""
    return 0 if report.forecast.device.startswith("cuda") else report.measured.first_step_peak_bytes


def unexplained_bytes(report: RunReport) -> int:
    """Process bytes of the steps' peak that no part of the forecast accounts for; negative if it foresaw more."""
    return report.unexplained_bytes


def time_findings(report: RunReport) -> tuple[str, ...]:
    """Where the measured step lies outside what computing and moving were said to take, and what that means."""
    link, seconds = report.forecast.link, report.measured.step_seconds_median
    if link is None or seconds is None or report.measured.steps < _LEAST_STEPS:
        return ()
    tier = "disk" if link.tier == "disk" else "link to host memory"
    if seconds > _LONGER * link.serial_seconds:
        return (
            f"The step took {format_seconds(seconds)}, and computing and moving one after the other was to take "
            f"{format_seconds(link.serial_seconds)}: the {tier} is slower in the run than the "
            f"{format_bytes(link.write_bytes_per_second)} written and {format_bytes(link.read_bytes_per_second)} read "
            "a second that were measured before it, or the processor has other work.",
        )
    if seconds < _SHORTER * link.ideal_seconds:
        larger = "computing" if link.compute_seconds >= link.moving_seconds else f"the {tier}"
        return (
            f"The step took {format_seconds(seconds)}, less than the {format_seconds(link.ideal_seconds)} that "
            f"{larger} alone was to take: the forecast of its time is too long, and other plans may have been shorter.",
        )
    return ()


def run_grid(report: RunReport) -> Grid:
    """What was predicted and what was measured, quantity by quantity."""
    forecast, measured = report.forecast, report.measured
    predicted_bytes, measured_bytes = steady_process_bytes(report), measured_steady_bytes(report)
    moved_bytes = measured.bytes_moved_per_step
    # What was measured already is no prediction.
    first = None if "first_step" in forecast.measured_phases else forecast.phases.get("first_step")
    first_bytes = first.process_bytes if first is not None else None
    rows = [
        (
            "process peak, steady step",
            format_bytes(predicted_bytes),
            format_bytes(measured_bytes),
            error_percent(predicted_bytes, measured_bytes),
        ),
        (
            "process peak, first step",
            bytes_or_dash(first_bytes),
            bytes_or_dash(measured.first_step_peak_bytes or None),
            error_percent(first_bytes, measured.first_step_peak_bytes or None),
        ),
        (
            "step",
            seconds_or_dash(forecast.step_seconds),
            seconds_or_dash(measured.step_seconds_median),
            error_percent(forecast.step_seconds, measured.step_seconds_median),
        ),
        (
            "bytes moved per step",
            format_bytes(forecast.moved_bytes_per_step),
            bytes_or_dash(moved_bytes),
            error_percent(forecast.moved_bytes_per_step, moved_bytes),
        ),
    ]
    outside_bytes = outside_steps_bytes(report)
    if outside_bytes is not None:
        rows.insert(2, ("process peak, outside the steps", DASH, format_bytes(outside_bytes), DASH))
    gap_bytes = unexplained_bytes(report)
    if gap_bytes:
        gap = f"{'-' if gap_bytes < 0 else ''}{format_bytes(abs(gap_bytes))}"
        rows.append(("not itemised in the forecast", DASH, gap, DASH))
    return Grid(
        title="Prediction and measurement",
        columns=("quantity", "predicted", "measured", "prediction error"),
        rows=tuple(rows),
    )


def loss_difference(reference: Outcome, other: Outcome) -> str:
    """Largest difference between two runs' losses, step by step, over the steps that both have."""
    pairs = list(zip(reference.losses, other.losses, strict=False))
    if not pairs:
        return DASH
    noun = "step" if len(pairs) == 1 else "steps"
    if all(ours == theirs for theirs, ours in pairs):
        return f"0, bit for bit, over {len(pairs)} {noun}"
    distances = [abs(ours - theirs) for theirs, ours in pairs]
    # A loss that is no number is further away than any; max() alone would depend on where it stands.
    largest = math.nan if any(math.isnan(distance) for distance in distances) else max(distances)
    return f"{largest:.1e} over {len(pairs)} {noun}"


def comparison_grid(outcomes: Sequence[Outcome]) -> Grid:
    """Runs side by side; the first is what the others are compared with."""
    first = outcomes[0]

    columns = [
        (
            bytes_or_dash(outcome.peak_predicted_bytes),
            bytes_or_dash(outcome.peak_measured_bytes) + _times(outcome.peak_measured_bytes, first.peak_measured_bytes),
            error_percent(outcome.peak_predicted_bytes, outcome.peak_measured_bytes),
            seconds_or_dash(outcome.step_seconds) + _times(outcome.step_seconds, first.step_seconds),
            DASH if outcome is first else loss_difference(first, outcome),
            outcome.actions,
        )
        for outcome in outcomes
    ]
    names = (
        "process peak, predicted",
        "process peak, measured",
        "prediction error",
        "step",
        "loss difference",
        "actions",
    )
    return Grid(
        title="Before and after",
        columns=("", *(outcome.name for outcome in outcomes)),
        rows=tuple(zip(names, *columns, strict=True)),
        text_columns=tuple(range(len(outcomes) + 1)),
    )


def _times(value: float | None, reference: float | None) -> str:
    """The ratio in brackets, where there is one to tell."""
    ratio = ratio_text(value, reference)
    return "" if ratio in (DASH, "1.00x") else f" ({ratio})"
