"""Runs `memwall plan`: from a trace, or from a workload recorded now or on fake tensors, to a plan file."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import (
    AllowOption,
    AutocastOption,
    CheckpointingOption,
    DiskOption,
    DtypeOption,
    EvalBatchOption,
    HostOption,
    JsonOption,
    LoraOption,
    MaskShareOption,
    ModeOption,
    NoDiskOption,
    OptimizerOption,
    RouteOption,
    parse_allow,
    parse_budget,
    parse_disk,
    parse_host,
    require_writable,
    write_json,
)
from memwall.cli.plans.plan_curve import CurveOption, curve_of
from memwall.cli.plans.plan_ranks import (
    ExplainOption,
    LinkOption,
    RanksOption,
    RanksPerNodeOption,
    asked_ranks,
    show_ranks,
)
from memwall.cli.plans.plan_request import ModelAsked, PlanRequest
from memwall.cli.plans.without_plan import forecast_without_plan
from memwall.cli.running.run_file import require_page_file
from memwall.cli.verbosity import is_verbose
from memwall.errors import InfeasibleError, UsageError
from memwall.machine.collector import without_collector

if TYPE_CHECKING:
    from memwall.cli.plans.plan_source import Source
    from memwall.machine.hardware import Hardware
    from memwall.planning.forecast import Forecast
    from memwall.planning.settings import Settings


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|SPEC",
            help="Trace file, package.module:factory, path/file.py:factory; with --device a Hugging Face config.json.",
        ),
    ],
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="What the process may use: 10GiB, 800MiB, 50%.")
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Device to plan for, as h100-80gb; by default the trace's."),
    ] = None,
    host: HostOption = None,
    disk: DiskOption = None,
    no_disk: NoDiskOption = False,
    allow: AllowOption = None,
    mode: ModeOption = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, metavar="N", help="Samples per optimizer step; kept.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, metavar="N", help="With a config.json: samples per forward.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, metavar="N", help="With a config.json: tokens per sample.")
    ] = None,
    eval_batch: EvalBatchOption = None,
    optimizer: OptimizerOption = None,
    dtype: DtypeOption = None,
    autocast: AutocastOption = None,
    checkpointing: CheckpointingOption = False,
    lora: LoraOption = None,
    mask_share: MaskShareOption = None,
    route: RouteOption = "translate",
    has_curve: CurveOption = False,
    ranks: RanksOption = None,
    ranks_per_node: RanksPerNodeOption = None,
    link: LinkOption = None,
    explain: ExplainOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="plan.json", help="Where the plan is written.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="plan.html", help="Also write a page: the step with and without the plan."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose what to recompute, offload or split so that the step fits the budget.

    -v shows every table, and what is not modelled.

    With --ranks also how to divide the model; budget and batch are those of one rank, host memory is a node's.
    """
    hardware = _hardware(device)
    known = None if hardware is None else hardware.name
    asked = asked_ranks(ranks, ranks_per_node, link, is_explained=explain, device=known)
    if has_curve and asked is not None:
        raise UsageError("--curve: not together with --ranks, which shows a curve over their number")
    host_bytes = parse_host(host)
    if host_bytes and asked is not None:
        host_bytes //= asked.num_ranks_per_node
    request = PlanRequest(
        source=source,
        device=device,
        hardware=hardware,
        budget_bytes=parse_budget(
            budget, device=device, whole_bytes=None if hardware is None else hardware.usable_bytes
        ),
        host_bytes=host_bytes,
        disk=parse_disk(disk),
        no_disk=no_disk,
        allowed=parse_allow(allow, mode),
        global_batch=global_batch,
        model=ModelAsked(
            batch=batch,
            sequence=seq,
            optimizer=optimizer,
            dtype=dtype,
            autocast=autocast,
            is_checkpointed=checkpointing,
            lora=lora,
            eval_batch=eval_batch,
            mask_share=mask_share,
            route=route,
        ),
        ranks=asked,
    )
    if output is not None:
        require_writable(output, option="--output")
    if report is not None:
        if asked is not None:
            raise UsageError("--report: not together with --ranks, whose tables are shown at once")
        require_page_file(report)
    request.check()
    # What is read and recorded for ranks are many objects, all of which stay.
    with nullcontext() if asked is None else without_collector():
        found = request.recorded()
    from memwall.cli.output import forecast_status

    if asked is None:
        forecast = _show_plan(request, found, output, report, has_curve=has_curve, as_json=as_json)
    else:
        forecast = show_ranks(asked, found.trace, _settings_of_ranks(request), output=output, as_json=as_json)
    raise typer.Exit(forecast_status(forecast))


def _show_plan(
    request: PlanRequest,
    found: "Source",
    output: Path | None,
    report: Path | None,
    *,
    has_curve: bool,
    as_json: bool,
) -> "Forecast":
    """Plans, writes the plan and its page, and shows it; returns its forecast."""
    from msgspec.structs import replace
    from rich.console import Group

    from memwall.cli.output import show
    from memwall.planning.device_phases import with_smallest_that_holds
    from memwall.report.budget_curve import budget_curve_view
    from memwall.report.summary import forecast_summary
    from memwall.report.text import plan_report

    plan_for = partial(request.plan_for, found)
    try:
        made = plan_for(request.budget_bytes)
    except InfeasibleError as error:
        if as_json:
            write_json(forecast_without_plan(found.trace, error, request.hardware))
        raise
    if found.evaluated is not None and not made.forecast.fits:
        made = with_smallest_that_holds(made, plan_for)
    if output is not None:
        made.save(output)
    if report is not None:
        from memwall.report.html import save_page
        from memwall.report.plan_page import plan_page

        save_page(plan_page(f"memwall plan: {Path(request.source).name}", made, found.trace), report)
    shown = plan_report(made) if is_verbose() else forecast_summary(made, output, report)
    if has_curve:
        made = replace(made, forecast=replace(made.forecast, curve=curve_of(made, plan_for)))
        shown = Group(shown, budget_curve_view(made.forecast))
    show(shown, made.forecast, as_json=as_json)
    return made.forecast


def _settings_of_ranks(request: PlanRequest) -> "Settings":
    from memwall.planning.settings import Settings

    return Settings(
        budget_bytes=request.budget_bytes,
        hardware=request.hardware,
        tier_capacity_bytes=request.host_bytes,
        allow=request.allowed,
        allow_accumulation=request.global_batch is not None,
    )


def _hardware(device: str | None) -> "Hardware | None":
    """Returns the device of that name; None for one of this machine, and where none is named."""
    if device is None or re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None:
        return None
    from memwall.machine.hardware import hardware_named
    from memwall.predict.cuda.context import with_measured_context

    return with_measured_context(hardware_named(device))
