"""Finds the largest batch, or the longest sample, whose forecast fits a budget: `memwall estimate --batch max`."""

from collections.abc import Callable

from memwall.planning.estimate import Estimate

MOST_BATCH = 1 << 16
MOST_TOKENS = 1 << 20
# Each forecast records a step; a search that needs more than these is one whose peaks jump.
_MOST_FORECASTS = 24


def largest_that_fits(
    forecast_of: Callable[[int], Estimate], *, most: int, unit: int = 1, told: Callable[[int, Estimate], None]
) -> tuple[int, Estimate]:
    """Returns the largest size whose forecast fits with its margin, and that forecast; of the least, where none fits.

    A peak grows about in proportion to the size, so that two forecasts tell where to look for the next.

    Args:
        forecast_of: makes the forecast of a size.
        most: the largest size to ask for; it has to be one that can be asked for.
        unit: sizes are its multiples, but for `most`.
        told: is called with every size and its forecast.
    """
    known: dict[int, Estimate] = {}

    def ask(size: int) -> Estimate:
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


def _next(known: dict[int, Estimate], low: int, high: int, unit: int) -> int:
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
