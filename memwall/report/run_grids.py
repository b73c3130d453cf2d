"""Shows prediction beside measurement, and one run beside another, as tables."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from memwall.observe.run_report import RunReport
from memwall.report.grid import DASH, Grid, bytes_or_dash, error_percent, ratio_text, seconds_or_dash
from memwall.units import format_bytes, format_seconds

# How far a step may lie outside the bounds that its forecast gave: its time is that noisy where both are right.
_SHORTER, _LONGER = 0.95, 1.1
_LEAST_STEPS = 5
_Compared = tuple[str, Callable[[Any], str], float | None, float | None]


class Outcome(Struct, frozen=True, kw_only=True):
    """Holds one run of a comparison."""

    name: str
    """E.g. "free run" or "under the plan"."""
    peak_predicted_bytes: int | None = None
    """Process bytes of a steady step."""
    peak_measured_bytes: int | None = None
    step_seconds: float | None = None
    losses: tuple[float, ...] = ()
    """Loss of every step, in order."""
    actions: str = "none"
    """Says in a few words what was done."""


def time_findings(report: RunReport) -> tuple[str, ...]:
    """Says where the measured step lies outside what computing and moving were said to take, and what that means."""
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
            f"{larger} alone was to take: most batches were smaller than the recorded one, or the forecast of its time "
            "is too long, and other plans may have been shorter.",
        )
    return ()


def _of_allocator(report: RunReport) -> Iterator[_Compared]:
    """Yields what torch's allocator counts of a CUDA device in the steps under the plan."""
    foreseen, found = report.forecast.phases["steady_step"], report.measured.peak
    if found.reserved_bytes is not None:
        yield "allocated peak, steady step", _needed, foreseen.allocated_bytes, found.allocated_bytes
        yield "reserved peak, steady step", _needed, foreseen.reserved_bytes, found.reserved_bytes
        yield "free between blocks in use", bytes_or_dash, None, report.measured.inactive_bytes
    if report.measured.others_bytes:
        yield "held by other processes, no part of these", bytes_or_dash, None, report.measured.others_bytes
    if report.measured.num_alloc_retries:
        yield (
            "cache given back for a request",
            lambda number: f"{number} times",
            None,
            report.measured.num_alloc_retries,
        )


def run_grid(report: RunReport) -> Grid:
    """Shows what was predicted and what was measured, quantity by quantity."""
    forecast, measured = report.forecast, report.measured
    # What was measured already is no prediction.
    first = None if "first_step" in forecast.measured_phases else forecast.phases.get("first_step")
    first_bytes = first.process_bytes if first is not None else None
    compared: list[_Compared] = [
        ("process peak, steady step", _needed, forecast.steady_process_bytes, report.steady_peak_bytes),
        ("process peak, first step", _needed, first_bytes, measured.first_step_peak_bytes or None),
        *_of_allocator(report),
        ("step", seconds_or_dash, forecast.step_seconds, measured.step_seconds_median),
        ("bytes moved per step", bytes_or_dash, forecast.moved_bytes_per_step, measured.bytes_moved_per_step),
    ]
    rows = [
        (name, shown(predicted), shown(found), error_percent(predicted, found))
        for name, shown, predicted, found in compared
    ]
    outside_bytes, gap_bytes = report.outside_steps_bytes, report.unexplained_bytes
    if outside_bytes is not None:
        rows.insert(2, ("process peak, outside the steps", DASH, _needed(outside_bytes), DASH))
    if measured.proof_peak_bytes > report.steady_peak_bytes:
        rows.insert(2, ("process peak, step that proved actions", DASH, _needed(measured.proof_peak_bytes), DASH))
    if gap_bytes:
        gap = f"{'-' if gap_bytes < 0 else ''}{format_bytes(abs(gap_bytes))}"
        rows.append(("not itemised in the forecast", DASH, gap, DASH))
    return Grid(
        title="Prediction and measurement",
        columns=("quantity", "predicted", "measured", "prediction error"),
        rows=tuple(rows),
    )


def loss_difference(reference: Outcome, other: Outcome) -> str:
    """Returns the largest difference between two runs' losses, step by step, over the steps that both have."""
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
    """Shows runs side by side; the first is what the others are compared with."""
    first = outcomes[0]

    columns = [
        (
            _needed(outcome.peak_predicted_bytes),
            _needed(outcome.peak_measured_bytes) + _times(outcome.peak_measured_bytes, first.peak_measured_bytes),
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


def _needed(num_bytes: int | None) -> str:
    return bytes_or_dash(num_bytes, rounding="up")


def _times(value: float | None, reference: float | None) -> str:
    """Returns the ratio in brackets, where there is one to tell."""
    ratio = ratio_text(value, reference)
    return "" if ratio in (DASH, "1.00x") else f" ({ratio})"
