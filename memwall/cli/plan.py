"""`memwall plan`: from a trace, or from a workload recorded now, to a plan file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import (
    AllowOption,
    DiskOption,
    HostOption,
    JsonOption,
    parse_allow,
    parse_budget,
    parse_disk,
    parse_host,
    require_file,
    require_writable,
    write_json,
)
from memwall.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from memwall.cli.options import DiskTier
    from memwall.plan.forecast import Forecast
    from memwall.trace.records import Trace


def plan(
    source: Annotated[
        str,
        typer.Argument(metavar="TRACE|SPEC", help="Trace file, package.module:factory, or path/file.py:factory."),
    ],
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="What the process may use: 10GiB, 800MiB, 50%.")
    ],
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Device to plan for; by default the trace's.")
    ] = None,
    host: HostOption = None,
    disk: DiskOption = None,
    allow: AllowOption = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, metavar="N", help="Samples per optimizer step; kept.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="plan.json", help="Where the plan is written.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose what to recompute, offload or split so that the step fits the budget."""
    budget_bytes = parse_budget(budget, device=device)
    disk_tier, allowed = parse_disk(disk), parse_allow(allow)
    parse_host(host)
    if output is not None:
        require_writable(output, option="--output")
    trace = with_disk(load_source(source), disk_tier)
    from memwall.cli.output import show
    from memwall.plan.search import plan as search
    from memwall.report.text import plan_report

    if device not in (None, trace.device):
        raise UsageError(
            f"--device {device}: the trace was recorded on {trace.device}, and translating it to another device is "
            f"not possible yet; leave --device out"
        )
    try:
        found = search(
            trace,
            budget=budget_bytes,
            disk=None if disk_tier is None else str(disk_tier.directory),
            disk_capacity_bytes=None if disk_tier is None else disk_tier.limit_bytes,
            allow=allowed,
            global_batch=global_batch,
        )
    except InfeasibleError as error:
        if as_json:
            write_json(forecast_without_plan(trace, error))
        raise
    if output is not None:
        found.save(output)
    show(plan_report(found), found.forecast, as_json=as_json)
    if not found.forecast.fits:
        raise typer.Exit(4)


def load_source(source: str) -> "Trace":
    """The trace of a file, or of a workload recorded now.

    Raises:
        UsageError: there is no such file, or the factory cannot be loaded.
        TraceError: the file is no trace.
    """
    if ":" in source and not Path(source).exists():
        from memwall.trace.record import record
        from memwall.trace.spec import load_workload

        return record(load_workload(source))
    path = require_file(
        Path(source), expected="a trace written by memwall profile, or package.module:factory, or path/file.py:factory"
    )
    from memwall.trace.file import load_trace

    return load_trace(path)


def with_disk(trace: "Trace", tier: "DiskTier | None") -> "Trace":
    """The trace with the speeds of another disk than the one it was recorded with, measured now."""
    if tier is None or trace.device != "cpu" or trace.machine.disk == str(tier.directory):
        return trace
    import msgspec

    from memwall.apply.parking import measured_machine

    return msgspec.structs.replace(trace, machine=measured_machine(str(tier.directory)))


def forecast_without_plan(trace: "Trace", error: InfeasibleError) -> "Forecast":
    """What `--json` prints where nothing fits: the peak is what the leanest plan needs, its margin included."""
    from memwall.plan.forecast import Forecast, PeakBytes

    smallest_bytes = error.smallest_feasible_bytes
    return Forecast(
        device=trace.device,
        source=trace.source,
        fits=False,
        budget_bytes=error.budget_bytes,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=max(0, smallest_bytes - trace.base_bytes), process_bytes=smallest_bytes),
        phases={},
        step_seconds=None,
        not_modelled=(),
        smallest_feasible_budget_bytes=smallest_bytes,
        relaxations=error.relaxations,
    )
