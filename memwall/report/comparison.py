"""Picks what of a trace, a plan, a run or a snapshot is compared with another of its kind."""

from collections.abc import Iterable, Iterator, Sequence

from memwall.observe.run_report import RunReport
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan
from memwall.predict.curve import LineShare, Share, peak_of, step_seconds
from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.report.difference import Group, Quantity, Side
from memwall.report.plan_grids import PLACES
from memwall.report.trace_grids import highest_point, phase_peaks, shown_steps
from memwall.trace.records import Trace, trace_tag
from memwall.trace.snapshot.records import Snapshot
from memwall.units import format_bytes


def trace_side(trace: Trace, source: str) -> Side:
    """Returns live tensors of a trace: its peak, the phases of its last step, and who holds the peak."""
    highest = highest_point(trace)
    quantities: list[Quantity] = []
    steps = shown_steps(trace)
    if highest is not None:
        peaks = [(f"live tensors, {step.kind} step", peak_of(trace, step).live_bytes) for step in steps]
        quantities = [
            Quantity("peak", "live tensors", highest.peak.live_bytes),
            *(Quantity("quantity", *peak) for peak in peaks),
            Quantity("quantity", "held before the step", trace.base_bytes),
            Quantity("quantity", "library workspaces", trace.workspace_bytes),
            *(Quantity("phase", phase, num_bytes) for phase, (num_bytes, _) in phase_peaks(trace, steps[-1]).items()),
            *_shares("category", highest.peak.by_category),
            *_shares("module", highest.peak.by_module),
            *_shares("line", highest.peak.by_line),
        ]
    return Side(
        source=source,
        kind="trace",
        tag=trace_tag(trace),
        quantities=tuple(quantities),
        step_seconds=(step_seconds(steps[-1]) or None) if steps else None,
        conditions={
            "device": trace.device,
            "torch": trace.torch_version,
            "optimizer": trace.optimizer,
            "micro-batch": str(trace.micro_batch),
            "micro-batches per step": str(trace.num_micro_batches),
            "autocast": trace.autocast,
            "steps": " and ".join(step.kind for step in steps) or "none",
        },
    )


def plan_side(plan: Plan, source: str) -> Side:
    """Returns what a plan foresees: its peak by place, and of the process by phase."""
    forecast = plan.forecast
    quantities = [
        Quantity("peak", "process", forecast.peak.process_bytes),
        *_places(forecast.peak),
        Quantity("quantity", "margin", forecast.margin_bytes),
        Quantity("quantity", "moved per step", forecast.moved_bytes_per_step),
        *(Quantity("phase", name.replace("_", " "), peak.process_bytes) for name, peak in forecast.phases.items()),
    ]
    if forecast.smallest_feasible_budget_bytes is not None:
        quantities.append(Quantity("quantity", "smallest budget", forecast.smallest_feasible_budget_bytes))
    return Side(
        source=source,
        kind="plan",
        tag="simulated",
        quantities=tuple(quantities),
        step_seconds=forecast.step_seconds,
        conditions=_conditions(forecast, forecast.budget_bytes)
        | {
            "model": plan.model_fingerprint[:12],
            "micro-batch": f"{plan.num_micro_batches} x {plan.micro_batch}",
            "actions": str(len(plan.actions)),
        },
    )


def run_side(run: RunReport, source: str) -> Side:
    """Returns what a run measured; what it foresaw stands in its plan."""
    measured = run.measured
    quantities = [
        Quantity("peak", "process", run.judged_peak_bytes),
        *_places(measured.peak),
        Quantity("quantity", "moved per step", measured.bytes_moved_per_step or 0),
        Quantity("phase", "first step", measured.first_step_peak_bytes),
        Quantity("phase", "steps under the plan", run.steady_peak_bytes),
    ]
    return Side(
        source=source,
        kind="run",
        tag=run.measured.tag,
        quantities=tuple(quantities),
        step_seconds=measured.step_seconds_median,
        conditions=_conditions(run.forecast, run.budget_bytes)
        | {"plan": run.plan_hash[:12], "recoveries from out of memory": str(measured.oom_recoveries)},
    )


def snapshot_side(snapshot: Snapshot, analyses: Sequence[DeviceAnalysis], source: str) -> Side:
    """Returns the caching allocator's memory of each device of a snapshot, and who holds what is in use at most."""
    quantities: list[Quantity] = []
    for analysis in sorted(analyses, key=lambda found: found.device):
        where = f"GPU {analysis.device}: " if len(analyses) > 1 else ""
        used, held = analysis.peak.fragmentation, analysis.reserved_peak.fragmentation
        quantities += [
            Quantity("peak", f"{where}most in use", used.active_bytes),
            Quantity("peak", f"{where}most held", held.reserved_bytes),
            Quantity("quantity", f"{where}stranded when most was held", held.stranded_bytes),
            Quantity("quantity", f"{where}idle segments then", held.idle_bytes),
            Quantity("quantity", f"{where}in use at the end", analysis.final.fragmentation.active_bytes),
            *_shares("category", analysis.by_category, where),
            *_shares("line", analysis.by_line, where),
        ]
    return Side(
        source=source,
        kind="snapshot",
        tag="external",
        quantities=tuple(quantities),
        conditions={
            "devices": str(len(analyses)),
            "allocator settings": snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF") or "default",
            "history": "recorded" if any(snapshot.traces) else "none",
        },
    )


def _conditions(forecast: Forecast, budget_bytes: int | None) -> dict[str, str]:
    budget = "none" if budget_bytes is None else format_bytes(budget_bytes, rounding="down")
    return {"device": forecast.device, "budget": budget}


def _places(peak: PeakBytes) -> Iterator[Quantity]:
    """Gives the places where bytes are, beside the process as a whole."""
    for field, name in PLACES.items():
        num_bytes = getattr(peak, field)
        if num_bytes and field != "process_bytes":
            yield Quantity("quantity", "allocated" if field == "allocated_bytes" else name, num_bytes)


def _shares(group: Group, shares: Iterable[Share | LineShare], where: str = "") -> Iterator[Quantity]:
    for share in shares:
        # A path or a line as it is; a category, which a module's holder may be, too, in words.
        is_category = group == "category" or share.name.startswith("(")
        yield Quantity(group, where + (share.name.replace("_", " ") if is_category else share.name), share.num_bytes)
