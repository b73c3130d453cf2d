"""Runs `memwall explain`: says what is in the peak of a trace or a CUDA snapshot, or why a plan is as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import JsonOption, TorchOption, require_file
from memwall.errors import UsageError

if TYPE_CHECKING:
    from memwall.predict.snapshot.fit_on_device import FitOnDevice


def explain(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE|SNAPSHOT|plan.json", help="Trace, CUDA memory snapshot or plan file.")
    ],
    torch_version: TorchOption = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Of a snapshot: would the run fit on this device, as a100-40gb?"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what makes the peak; for a plan, what each action saves and what binds.

    With --device the exit status says whether the recorded run fits there as it is: 0, 4 at the edge, 3 if not.
    """
    require_file(
        source,
        expected="a trace written by memwall profile, a snapshot written by torch.cuda.memory._dump_snapshot(), "
        "or a plan written by memwall plan",
    )
    from memwall.cli.output import show, trace_summary
    from memwall.cli.source import kind_of
    from memwall.report.text import plan_report, snapshot_report, trace_report

    kind = kind_of(source)
    if torch_version is not None and kind != "snapshot":
        raise UsageError(f"--torch {torch_version}: only for a CUDA memory snapshot, which does not say what wrote it")
    if device is not None and kind != "snapshot":
        raise UsageError(
            f"--device {device}: only for a CUDA memory snapshot; of a trace "
            f"`memwall plan {source} --device {device} --budget SIZE` says what fits"
        )
    if kind == "trace":
        from memwall.trace.file import load_trace

        trace = load_trace(source)
        show(trace_report(trace), trace_summary(trace), as_json=as_json)
    elif kind == "snapshot":
        from memwall.cli.source import snapshot_summary
        from memwall.machine.hardware import hardware_named
        from memwall.trace.snapshot.read import load_snapshot

        hardware = None if device is None else hardware_named(device)
        summary = snapshot_summary(load_snapshot(source), torch_version, hardware=hardware)
        show(snapshot_report(summary.devices, summary.fits), summary, as_json=as_json)
        if summary.fits:
            raise typer.Exit(_status(summary.fits))
    elif kind == "json":
        from memwall.planning.planfile import Plan

        plan = Plan.load(source)
        show(plan_report(plan, is_explained=True), plan.forecast, as_json=as_json)
    else:
        raise UsageError(
            f"{source} is neither a trace nor a CUDA memory snapshot nor a plan; expected a file written by "
            "`memwall profile -o FILE`, torch.cuda.memory._dump_snapshot(FILE) or `memwall plan -o FILE`"
        )


def _status(fits: "Sequence[FitOnDevice]") -> int:
    """Returns the exit status of the run as it was recorded, on the device of a snapshot where it is worst."""
    recorded = {fit.recorded_device: fit.outcome for fit in reversed(fits)}.values()
    if "does not fit" in recorded:
        return 3
    return 4 if "fits only with the smallest context" in recorded else 0
