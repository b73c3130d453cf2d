"""Asks for the forecast of one device; searches for the largest batch or the longest sample where that is wanted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from memwall.cli.output import note
from memwall.errors import UsageError
from memwall.integrations.estimate import estimate
from memwall.integrations.hugging_face.hf_spec import positions_of
from memwall.integrations.largest import MOST_BATCH, MOST_TOKENS, largest_that_fits
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.planning.estimate import Estimate

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
    most, unit, what = MOST_BATCH, 1, "batch"
    if name == "sequence":
        most, unit, what = positions_of(question.spec) or MOST_TOKENS, _TOKEN_UNIT, "length"

    def tell(size: int, forecast: "Estimate") -> None:
        fits = "fits" if forecast.fits else "does not fit"
        note(f"{device}, {what} {size:,}: {format_bytes(forecast.peak.process_bytes)}, {fits}")

    size, forecast = largest_that_fits(lambda size: ask(**{name: size}), most=most, unit=unit, told=tell)
    if not forecast.fits:
        return Found(estimate=forecast, searched=f"no {what} fits, not even {size:,}")
    limit = ", which is the most that the model has positions for" if name == "sequence" and size == most else ""
    return Found(estimate=forecast, searched=f"{size:,} is the largest {what} that fits{limit}")
