"""Asks for the forecast of one device; with `--batch max` or `--seq max` searches for the largest size that fits."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from memwall.cli.output import note
from memwall.errors import UsageError
from memwall.integrations.estimate import estimate
from memwall.integrations.hugging_face.hf_spec import positions_of
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.planning.estimate import Estimate

_MOST_BATCH = 1 << 16
_MOST_TOKENS = 1 << 20
# Each forecast records a step; a search that needs more than these is one whose peaks jump.
_MOST_FORECASTS = 24
# Kernels run in tiles, and lengths of data are rounded up to them.
_TOKEN_UNIT = 64


class Question(Struct, frozen=True, kw_only=True):
    """Holds what the forecasts of all devices have in common."""

    spec: str
    batch: int | Literal["max"] | None
    sequence: int | Literal["max"] | None
    options: Mapping[str, Any]


class Found(Struct, frozen=True, kw_only=True):
    """Holds the forecast of one device, and what was searched for."""

    estimate: "Estimate"
    searched: str = ""
    """Says what the largest size is that fits, or that none does; "" where no size was searched for."""


def searched(question: Question, device: str, budget_bytes: int | None) -> Found:
    """Returns the forecast for a device; with "max" that of the largest size that fits it, margin included.

    Raises:
        UsageError: both sizes are to be found at once, or see `memwall.estimate`.
    """
    sizes = {"batch": question.batch, "sequence": question.sequence}
    open_names = [name for name, size in sizes.items() if size == "max"]
    if len(open_names) == 2:
        raise UsageError("--batch max --seq max: many pairs fit; give one of them as a number")

    def ask(**given: Any) -> "Estimate":
        return estimate(question.spec, device, budget=budget_bytes, **question.options, **(sizes | given))

    if not open_names:
        return Found(estimate=ask())
    name = open_names[0]
    most, unit, what = _MOST_BATCH, 1, "batch"
    if name == "sequence":
        most, unit, what = positions_of(question.spec) or _MOST_TOKENS, _TOKEN_UNIT, "length"

    def tell(size: int, forecast: "Estimate") -> None:
        fits = "fits" if forecast.fits else "does not fit"
        note(f"{device}, {what} {size:,}: {format_bytes(forecast.peak.process_bytes)}, {fits}")

    size, forecast = largest_that_fits(lambda size: ask(**{name: size}), most=most, unit=unit, told=tell)
    if not forecast.fits:
        return Found(estimate=forecast, searched=f"no {what} fits, not even {size:,}")
    limit = ", which is the most that the model has positions for" if name == "sequence" and size == most else ""
    return Found(estimate=forecast, searched=f"{size:,} is the largest {what} that fits{limit}")


def largest_that_fits(
    forecast_of: Callable[[int], "Estimate"], *, most: int, unit: int = 1, told: Callable[[int, "Estimate"], None]
) -> "tuple[int, Estimate]":
    """Returns the largest size whose forecast fits with its margin, and that forecast; of the least, where none fits.

    A peak grows about in proportion to the size, so that two forecasts tell where to look for the next.

    Args:
        forecast_of: makes the forecast of a size.
        most: the largest size to ask for; it has to be one that can be asked for.
        unit: sizes are its multiples, but for `most`.
        told: is called with every size and its forecast.
    """
    known: dict[int, Estimate] = {}

    def ask(size: int) -> "Estimate":
        known[size] = forecast_of(size)
        told(size, known[size])
        return known[size]

    low, high = min(unit, most), most + unit
    if not ask(low).fits:
        return low, known[low]
    while low < most and high - low > unit and len(known) < _MOST_FORECASTS:
        size = _next(known, low, high, unit)
        size = most if size >= most else size
        if ask(size).fits:
            low = size
        else:
            high = size
    return low, known[low]


def _next(known: "dict[int, Estimate]", low: int, high: int, unit: int) -> int:
    """Returns a multiple of the unit between both: near where the line through two forecasts meets the budget."""
    at = known[low]
    before = max((size for size in known if size < low), default=0)
    guess = 2 * low
    if before:
        slope = (at.peak.process_bytes - known[before].peak.process_bytes) / (low - before)
        room_bytes = (at.budget_bytes or 0) - at.margin_bytes - at.peak.process_bytes
        guess = low + int(room_bytes / slope) if slope > 0 else guess
    if len(known) > 4 and high in known:  # the line has had its chance: half of what is open goes with each forecast
        guess = (low + high) // 2
    return max(low + unit, min(guess // unit * unit, high - unit, 64 * low))
