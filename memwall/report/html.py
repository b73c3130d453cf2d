"""Makes one page with everything about a plan and its run, in one file that loads nothing from anywhere."""

import base64
import gzip
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import Struct

from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.predict.curve import Peak
from memwall.report.chart import chart_of, legend_of, scale_of
from memwall.report.curves import Curve
from memwall.report.grid import Grid, ratio_text
from memwall.report.page_libraries import require_page_libraries
from memwall.report.plan_grids import action_grid, forecast_phase_grid, lever_grid, plan_facts
from memwall.report.ranks_grids import ranks_grids
from memwall.report.run_grids import Outcome, comparison_grid, run_grid
from memwall.report.text import Verdict, plan_verdict, ranks_text, run_findings, run_verdict
from memwall.report.trace_grids import holder_grids, place_of
from memwall.units import format_bytes, format_seconds
from memwall.versioned_files import whole_file


class Card(Struct, frozen=True):
    """Holds a figure worth a large print."""

    name: str
    value: str
    remark: str


class Page(Struct, frozen=True, kw_only=True):
    """Says what one page shows; parts that are not given are left out."""

    title: str
    verdict: Verdict | None = None
    """Verdict where no plan and no run has one."""
    cards: tuple[Card, ...] = ()
    """Before those of plan and run."""
    curves: tuple[Curve, ...] = ()
    """Drawn beside each other with the same scales."""
    curves_title: str = "Memory over one step"
    grids: tuple[Grid, ...] = ()
    """Tables before those of plan and run."""
    outcomes: tuple[Outcome, ...] = ()
    """Runs of the before/after table; the first is what the others are compared with."""
    plan: Plan | None = None
    run: RunReport | None = None
    schedules: tuple[Grid, ...] = ()
    """Tables after those of plan and run."""
    notes: tuple[str, ...] = ()
    """Further lines on what the figures count, e.g. `trace_scope`."""


class _Panel(Struct, frozen=True, kw_only=True):
    """Holds one figure in plotly's form with its heading."""

    name: str
    tag: str
    summary: str
    chart: dict[str, Any]


class _Holders(Struct, frozen=True, kw_only=True):
    """Says what is in the peak of one curve."""

    name: str
    where: str
    grids: tuple[Grid, ...]


def save_page(page: Page, path: str | Path) -> None:
    """Writes the page as one HTML file.

    Raises:
        UsageError: plotly or jinja2 is not installed, or the file cannot be written.
    """
    content = page_html(page)
    with whole_file(Path(path), noun="page") as file:
        file.write(content.encode())


def page_html(page: Page) -> str:
    """Returns the page; equal input gives equal text.

    Raises:
        UsageError: plotly or jinja2 is not installed.
    """
    require_page_libraries()
    import jinja2
    from plotly.offline import get_plotlyjs

    template = resources.files("memwall.report").joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=page.title,
        verdict=_verdict(page),
        cards=_cards(page),
        panels=_panels(page.curves),
        panels_title=page.curves_title,
        legend=legend_of(page.curves),
        grids=_grids(page),
        facts=plan_facts(page.plan) if page.plan is not None else (),
        holders=[_holders(curve, curve.peak) for curve in page.curves if curve.peak is not None],
        scope=_scope(page),
        # 4.8 MB as it is, 2 MB like this: plotly.js 4.1 alone would otherwise fill the page's 5 MB.
        plotly=_packed(get_plotlyjs()) if page.curves else "",
    )


def _packed(script: str) -> str:
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _verdict(page: Page) -> Verdict | None:
    if page.run is not None:
        return run_verdict(page.run)
    return plan_verdict(page.plan) if page.plan is not None else page.verdict


def _cards(page: Page) -> list[Card]:
    forecast = page.run.forecast if page.run is not None else page.plan.forecast if page.plan is not None else None
    cards = list(page.cards)
    if forecast is None:
        return cards
    if forecast.budget_bytes is not None:
        smallest = forecast.smallest_feasible_budget_bytes
        remark = f"{format_bytes(smallest, rounding='up')} would do" if smallest is not None else "of the process"
        cards.append(Card("budget", format_bytes(forecast.budget_bytes, rounding="down"), remark))
    remark = f"margin {format_bytes(forecast.margin_bytes)}"
    predicted_bytes = forecast.peak.process_bytes if page.run is None else page.run.forecast.steady_process_bytes
    cards.append(Card("predicted peak", format_bytes(predicted_bytes, rounding="up"), remark))
    if page.run is not None:
        measured_bytes = page.run.steady_peak_bytes
        cards.append(
            Card("measured peak", format_bytes(measured_bytes, rounding="up"), f"{page.run.measured.steps} steps")
        )
    plain_seconds = forecast.plain_step_seconds
    seconds = page.run.measured.step_seconds_median if page.run is not None else forecast.step_seconds
    if page.outcomes and page.outcomes[0].step_seconds and page.run is not None:
        # By the script's own clock, as in the table of both runs.
        plain_seconds, seconds = page.outcomes[0].step_seconds, page.outcomes[-1].step_seconds or seconds
    if seconds is not None:
        kind = "measured" if page.run is not None else "predicted"
        remark = f"{ratio_text(seconds, plain_seconds)} the free run" if plain_seconds else kind
        cards.append(Card(f"{kind} step", format_seconds(seconds), remark))
    return cards


def _panels(curves: Sequence[Curve]) -> list[_Panel]:
    scale = scale_of(curves)
    return [
        _Panel(
            name=curve.name,
            tag=curve.tag,
            summary=curve.summary,
            chart=chart_of(curve, scale),
        )
        for curve in curves
    ]


def _grids(page: Page) -> list[Grid]:
    grids = list(page.grids)
    if page.outcomes:
        grids.append(comparison_grid(page.outcomes))
    if page.run is not None:
        grids.append(run_grid(page.run))
    if page.plan is not None:
        forecast = page.plan.forecast
        grids.append(action_grid(page.plan.actions))
        if forecast.levers:
            grids.append(lever_grid(forecast.levers))
        grids += ranks_grids(forecast.ranks, is_explained=True)
        grids.append(forecast_phase_grid(forecast))
    return [*grids, *page.schedules]


def _holders(curve: Curve, peak: Peak) -> _Holders:
    return _Holders(
        name=curve.name,
        where=f"{format_bytes(peak.live_bytes)} of live tensors, in {place_of(peak)} (operation {peak.op})",
        grids=holder_grids(peak),
    )


def _scope(page: Page) -> list[str]:
    """Says what was not as planned, what the figures count, with which margin, and what they leave out."""
    lines = [] if page.run is None else run_findings(page.run)
    if page.run is not None and page.run.ranks is not None:
        lines.append(f"Ranks: {ranks_text(page.run.ranks)}.")
    forecast = page.plan.forecast if page.plan is not None else page.run.forecast if page.run is not None else None
    if forecast is not None:
        lines.append(
            f"Peaks are bytes of the process on {forecast.device}, with a margin of "
            f"{format_bytes(forecast.margin_bytes)}. Not modelled: "
            f"{'; '.join(forecast.not_modelled) or 'nothing known'}."
        )
    if any(curve.peak is not None for curve in page.curves):
        has_base = any(layer.category == "base" for curve in page.curves for layer in curve.layers)
        below = ", stacked on what the process held before the step (base)" if has_base else ""
        lines.append(
            f"Curves are bytes of live tensors{below}; memory that the allocator holds but no tensor uses is not drawn."
        )
    if page.plan is not None:
        lines.append(f"Plan {page.plan.plan_hash[:16]}, from trace {page.plan.trace_hash[:16]}.")
    return [*lines, *page.notes]
