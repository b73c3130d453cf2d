"""Compares forecasts of one training step for several devices: a table of a line for each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from rich.console import Group

from memwall.planning.estimate import Estimate
from memwall.report.grid import Grid, seconds_or_dash, share_percent
from memwall.report.plan_grids import fit_of
from memwall.report.text import tables_of
from memwall.trace.records import Tag
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.trace.workload_facts import WorkloadFacts

_FITS = {
    "fits": "fits",
    "inside-margin": "inside its margin",
    "does-not-fit": "does not fit",
    "no-budget": "no budget",
}


class _Found(Protocol):
    @property
    def estimate(self) -> Estimate: ...

    @property
    def searched(self) -> str: ...


class Comparison(Struct, frozen=True, kw_only=True):
    """Holds the forecasts of one training step for several devices."""

    schema: str = "memwall.estimates/1"
    tag: Tag = "simulated"
    estimates: tuple[Estimate, ...]


def compared(found: Sequence[_Found]) -> tuple[Group, Comparison]:
    """Returns a table for a terminal, and the record with everything in it."""
    is_searched = any(each.searched for each in found)
    columns = ("device", "budget", "peak", "margin", "share", "step, at least", *(("batch",) if is_searched else ()))
    rows = tuple(
        (
            each.estimate.device,
            format_bytes(each.estimate.budget_bytes or 0, rounding="down"),
            format_bytes(each.estimate.peak.process_bytes, rounding="up"),
            format_bytes(each.estimate.margin_bytes),
            share_percent(each.estimate.peak.process_bytes, each.estimate.budget_bytes or 0),
            seconds_or_dash(each.estimate.step_seconds),
            *((_batch_of(each.estimate.workload),) if is_searched else ()),
            _FITS[fit_of(each.estimate)],
        )
        for each in found
    )
    grid = Grid(
        title="The largest that fits each device (simulated)" if is_searched else "On each device (simulated)",
        columns=(*columns, ""),
        rows=rows,
        text_columns=(0, len(columns)),
    )
    workload = None if is_searched else found[0].estimate.workload
    return tables_of((grid,), workload), Comparison(estimates=tuple(each.estimate for each in found))


def _batch_of(workload: "WorkloadFacts | None") -> str:
    return "" if workload is None else " x ".join(f"{size:,}" for size in workload.input_shape)
