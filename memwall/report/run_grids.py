"""Prediction beside measurement, and one run beside another, as tables."""

from collections.abc import Sequence

from msgspec import Struct

from memwall.observe.run_report import RunReport
from memwall.report.grid import DASH, Grid, bytes_or_dash, error_percent, ratio_text, seconds_or_dash
from memwall.units import format_bytes

__all__ = ["Outcome", "comparison_grid", "loss_difference", "run_grid", "steady_process_bytes", "unexplained_bytes"]


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
    return report.forecast.phases.get("steady_step", report.forecast.peak).process_bytes


def unexplained_bytes(report: RunReport) -> int:
    """Process bytes of the measured peak that no part of the forecast accounts for; negative if it foresaw more."""
    return report.measured.peak.process_bytes - steady_process_bytes(report)


def run_grid(report: RunReport) -> Grid:
    """What was predicted and what was measured, quantity by quantity."""
    forecast, measured = report.forecast, report.measured
    predicted_bytes, measured_bytes = steady_process_bytes(report), measured.peak.process_bytes
    moved_bytes = sum(measured.bytes_moved.values()) // measured.steps if measured.steps else None
    first = forecast.phases.get("first_step")
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
    if unexplained_bytes(report) > 0:
        rows.append(("not itemised in the forecast", DASH, format_bytes(unexplained_bytes(report)), DASH))
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
    largest = max(abs(ours - theirs) for theirs, ours in pairs)
    noun = "step" if len(pairs) == 1 else "steps"
    # An unequal pair without a measurable distance is a NaN or an infinity: not the same training.
    if all(ours == theirs for theirs, ours in pairs):
        return f"0, bit for bit, over {len(pairs)} {noun}"
    return f"{largest:.1e} over {len(pairs)} {noun}"


def comparison_grid(outcomes: Sequence[Outcome]) -> Grid:
    """Runs side by side; the first is what the others are compared with."""
    first = outcomes[0]

    def cells(name: str, texts: Sequence[str]) -> tuple[str, ...]:
        return (name, *texts)

    times = [
        seconds_or_dash(outcome.step_seconds)
        if outcome is first or outcome.step_seconds is None
        else f"{seconds_or_dash(outcome.step_seconds)} ({ratio_text(outcome.step_seconds, first.step_seconds)})"
        for outcome in outcomes
    ]
    peaks = [
        bytes_or_dash(outcome.peak_measured_bytes)
        if outcome is first or outcome.peak_measured_bytes is None
        else f"{format_bytes(outcome.peak_measured_bytes)} "
        f"({ratio_text(outcome.peak_measured_bytes, first.peak_measured_bytes)})"
        for outcome in outcomes
    ]
    rows = (
        cells("process peak, predicted", [bytes_or_dash(outcome.peak_predicted_bytes) for outcome in outcomes]),
        cells("process peak, measured", peaks),
        cells(
            "prediction error",
            [error_percent(outcome.peak_predicted_bytes, outcome.peak_measured_bytes) for outcome in outcomes],
        ),
        cells("step", times),
        cells(
            "loss difference",
            [DASH if outcome is first else loss_difference(first, outcome) for outcome in outcomes],
        ),
        cells("actions", [outcome.actions for outcome in outcomes]),
    )
    return Grid(title="Before and after", columns=("", *(outcome.name for outcome in outcomes)), rows=rows)
