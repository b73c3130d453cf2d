"""Runs `memwall plan`: from a trace, or from a workload recorded now or on fake tensors, to a plan file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import (
    AllowOption,
    AutocastOption,
    CheckpointingOption,
    DiskOption,
    DiskWritesOption,
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
    parse_disk_writes,
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
from memwall.cli.plans.plan_source import device_trace, is_spec, trace_here, with_measured
from memwall.cli.verbosity import is_verbose
from memwall.errors import InfeasibleError, UsageError
from memwall.integrations.hugging_face.hf_config import config_path

if TYPE_CHECKING:
    from memwall.machine.hardware import Hardware
    from memwall.planning.forecast import Forecast
    from memwall.planning.planfile import Plan
    from memwall.planning.recordings import Recordings
    from memwall.trace.records import Trace


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
    disk_writes: DiskWritesOption = None,
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
    for option, value in (("--eval-batch", eval_batch), ("--disk-writes", disk_writes)):
        if asked is not None and value is not None:
            raise UsageError(f"{option} {value}: not together with --ranks; plan one process with it")
    budget_bytes = parse_budget(budget, device=device, whole_bytes=None if hardware is None else hardware.usable_bytes)
    disk_tier, allowed, host_bytes = parse_disk(disk), parse_allow(allow, mode), parse_host(host)
    disk_bytes_per_day = parse_disk_writes(disk_writes, no_disk=no_disk)
    if output is not None:
        require_writable(output, option="--output")
    given: dict[str, object] = {"--batch": batch, "--seq": seq, "--optimizer": optimizer, "--dtype": dtype}
    given |= {
        "--autocast": autocast,
        "--checkpointing": checkpointing or None,
        "--lora": lora,
        "--eval-batch": eval_batch,
    }
    if hardware is None or not is_spec(source):
        given |= {"--mask-share": mask_share, "--route": None if route == "translate" else route}
        unused = [option for option, value in given.items() if value is not None]
        if unused and hardware is None:
            raise UsageError(f"{', '.join(unused)}: only together with --device NAME")
        if unused:
            raise UsageError(f"{', '.join(unused)}: {source} is a trace, in which that is recorded; leave it out")
    if hardware is None:
        found = trace_here(source, disk_tier, allowed=allowed)
    else:
        if disk_tier is not None:
            raise UsageError(f"--disk {disk}: with --device NAME tensors move to host memory only; use --host SIZE")
        if route == "phantom":
            _check_for_phantom(allowed)
        if asked is not None and config_path(source) is not None:
            batch = asked.batch_of(global_batch, batch)
        elif batch is None and config_path(source) is not None:
            batch = global_batch
        if asked is not None and host_bytes:
            host_bytes //= asked.num_ranks_per_node
        found = device_trace(
            source,
            hardware,
            host_bytes=host_bytes or 0,
            mask_share=mask_share,
            route=route,
            allowed=allowed,
            autocast=autocast,
            batch=batch,
            sequence=seq,
            dtype=dtype,
            optimizer=optimizer,
            is_checkpointed=checkpointing,
            lora=lora,
            eval_batch=eval_batch,
            is_evaluated=asked is None,  # of several ranks it is not modelled
        )
    if host_bytes:
        found = with_measured(found, allowed)
    _check_recordable(source, allowed, None if asked is not None else found.recordings)
    trace = found.trace
    from msgspec.structs import replace
    from rich.console import Group

    from memwall.cli.output import forecast_status, show
    from memwall.planning.device_phases import with_smallest_that_holds
    from memwall.planning.search import plan as search
    from memwall.planning.settings import Settings
    from memwall.report.budget_curve import budget_curve_view
    from memwall.report.summary import forecast_summary
    from memwall.report.text import plan_report

    if hardware is None and device not in (None, trace.device):
        raise UsageError(
            f"--device {device}: the trace was recorded on {trace.device}; to plan for another device give its name, "
            "as in --device h100-80gb, or leave --device out"
        )
    if asked is not None:
        asked.check_batch(global_batch, trace)
        forecast = show_ranks(
            asked,
            trace,
            Settings(
                budget_bytes=budget_bytes,
                hardware=hardware,
                tier_capacity_bytes=host_bytes,
                allow=allowed,
                allow_accumulation=global_batch is not None,
            ),
            output=output,
            as_json=as_json,
        )
        raise typer.Exit(forecast_status(forecast))
    capacity_bytes = None if disk_tier is None else disk_tier.limit_bytes
    if trace.device != "cpu":
        capacity_bytes = host_bytes
        if disk_writes is not None:
            raise UsageError(f"--disk-writes {disk_writes}: tensors of {trace.device} move to host memory only")

    def plan_for(budget_bytes: int) -> "Plan":
        found_plan = search(
            trace,
            budget=budget_bytes,
            disk=None if disk_tier is None else str(disk_tier.directory),
            tier_capacity_bytes=capacity_bytes,
            disk_writes=disk_bytes_per_day,
            allow=allowed,
            global_batch=global_batch,
            hardware=hardware,
            recordings=found.recordings,
        )
        return found_plan if found.evaluated is None else found.evaluated(found_plan)

    try:
        made = plan_for(budget_bytes)
    except InfeasibleError as error:
        if as_json:
            write_json(forecast_without_plan(trace, error, hardware))
        raise
    if found.evaluated is not None and not made.forecast.fits:
        made = with_smallest_that_holds(made, plan_for)
    if output is not None:
        made.save(output)
    shown = plan_report(made) if is_verbose() else forecast_summary(made, output)
    if has_curve:
        curve = curve_of(made, plan_for)
        made = replace(made, forecast=replace(made.forecast, curve=curve))
        shown = Group(shown, budget_curve_view(made.forecast))
    show(shown, made.forecast, as_json=as_json)
    raise typer.Exit(forecast_status(made.forecast))


def _check_for_phantom(allow: tuple[str, ...]) -> None:
    """Raises UsageError where kernels are asked for: a process of its own makes the layers that they would replace."""
    from memwall.planning.modes import has_mode
    from memwall.planning.techniques import kernels

    word = kernels.TECHNIQUE.allow
    if word in allow and not has_mode(allow):
        raise UsageError(
            f"--allow {word}: the step is not recorded with {word} on the phantom device; leave --route phantom out"
        )


def _check_recordable(source: str, allow: tuple[str, ...], recordings: "Recordings | None") -> None:
    """Raises UsageError where a technique is allowed of which a trace file does not show what it does to the step."""
    from memwall.planning.modes import has_mode
    from memwall.planning.technique import techniques

    for technique in techniques():
        word = technique.allow
        is_offered = recordings is not None and word in recordings.offered
        if technique.is_seen_recorded and word in allow and not is_offered and not has_mode(allow):
            raise UsageError(
                f"--allow {word}: {source} is a trace, and what {word} do to a step is seen by recording it with them; "
                f"plan from the package.module:factory or the config.json, or give --allow {word} to `memwall run`"
            )


def _hardware(device: str | None) -> "Hardware | None":
    """Returns the device of that name; None for one of this machine, and where none is named."""
    if device is None or re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None:
        return None
    from memwall.machine.hardware import hardware_named
    from memwall.predict.cuda.context import with_measured_context

    return with_measured_context(hardware_named(device))


def forecast_without_plan(trace: "Trace", error: InfeasibleError, hardware: "Hardware | None" = None) -> "Forecast":
    """Returns what `--json` prints where nothing fits: the peak is what the leanest plan needs, its margin included."""
    from memwall.planning.forecast import Forecast, PeakBytes
    from memwall.trace.tags import route_of
    from memwall.trace.workload_facts import workload_facts

    smallest_bytes = error.smallest_feasible_bytes
    return Forecast(
        device=trace.device,
        source=trace.source,
        route=None if hardware is None else route_of(trace),
        fits=False,
        budget_bytes=error.budget_bytes,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=max(0, smallest_bytes - trace.base_bytes), process_bytes=smallest_bytes),
        phases={},
        step_seconds=None,
        not_modelled=error.not_modelled,
        smallest_feasible_budget_bytes=smallest_bytes,
        relaxations=error.relaxations,
        workload=workload_facts(trace),
    )
