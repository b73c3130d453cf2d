"""Runs the demo's script twice, as it is and under a plan for part of its peak, each in a process of its own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memwall.cli.verbosity import is_verbose
from memwall.errors import MemwallError, UsageError
from memwall.integrations.launcher import run_script
from memwall.observe.measure import run_report as run_report_of
from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.report.html import Page, save_page
from memwall.report.plan_page import plan_curves
from memwall.report.run_grids import Outcome
from memwall.report.summary import plan_summary, run_summary
from memwall.report.text import comparison, plan_report, run_report
from memwall.session.session import Session
from memwall.trace.file import load_trace, save_trace
from memwall.trace.records import Tag
from memwall.units import format_bytes, parse_size

# Python puts a script's folder first on the import path: it holds nothing that another import could mean.
_SCRIPT = Path(__file__).parent.parent / "demo" / "train.py"


class DemoResult(Struct, frozen=True, kw_only=True):
    """Holds the demo in figures, for `--json`."""

    schema: str = "memwall.demo/1"
    tag: Tag
    """Belongs to every figure that is not called predicted."""
    free_peak_bytes: int
    free_step_seconds: float
    budget_bytes: int
    predicted_free_peak_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_seconds: float
    losses_equal: bool
    weights_equal: bool
    report: str
    run: RunReport


def run_demo(*, budget: str, out: Path | None, as_json: bool, script_arguments: Sequence[str] = ()) -> int:
    """Runs the demo and prints its table.

    Args:
        budget: a size, or a percentage of the free run's peak.
        out: folder for trace, plan, run and report; a temporary one that stays by default.
        script_arguments: for the training script, e.g. a smaller model in tests.

    Returns:
        The exit status: 0, or what the run under the plan ended with.
    """
    folder = out if out is not None else Path(tempfile.mkdtemp(prefix="memwall-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json)
    with _progress() as progress:
        task = progress.add_task("free run: the script as it is", total=None)
        free_peak_bytes, free = _free_run(folder, script_arguments)
        budget_bytes = parse_size(budget, whole_bytes=free_peak_bytes)
        progress.update(task, description=f"run under a plan for {format_bytes(budget_bytes)}")
        status, planned = _planned_run(folder, script_arguments, budget_bytes)
    if status not in (0, 5):
        return status
    trace, plan = load_trace(folder / "demo.trace"), Plan.load(folder / "plan.json")
    run = RunReport.load(folder / "run.json")
    forecast = plan.forecast
    plain_peak_bytes = forecast.plain_peak.process_bytes if forecast.plain_peak else None
    # The first step warms up, or is recorded: not what the others cost.
    seconds = [statistics.median(record["step_seconds"][1:]) for record in (free, planned)]
    outcomes = (
        Outcome(
            name="free run",
            peak_predicted_bytes=plain_peak_bytes,
            peak_measured_bytes=free_peak_bytes,
            step_seconds=seconds[0],
            losses=tuple(free["losses"]),
        ),
        Outcome(
            name="under the plan",
            peak_predicted_bytes=forecast.phases["steady_step"].process_bytes,
            peak_measured_bytes=run.measured.peak.process_bytes,
            step_seconds=seconds[1],
            losses=tuple(planned["losses"]),
            actions=f"{len(plan.actions)} actions",
        ),
    )
    page = Page(
        title="memwall demo",
        curves=plan_curves(
            trace,
            plan,
            process_peak_bytes=run.measured.peak.process_bytes,
            plain_process_peak_bytes=free_peak_bytes,
        ),
        outcomes=outcomes,
        plan=plan,
        run=run,
    )
    save_page(page, folder / "report.html")
    result = DemoResult(
        tag=run.measured.tag,
        free_peak_bytes=free_peak_bytes,
        free_step_seconds=seconds[0],
        budget_bytes=budget_bytes,
        predicted_free_peak_bytes=plain_peak_bytes,
        predicted_peak_bytes=forecast.phases["steady_step"].process_bytes,
        measured_peak_bytes=run.measured.peak.process_bytes,
        step_seconds=seconds[1],
        losses_equal=free["losses"] == planned["losses"],
        weights_equal=free["weights_sha256"] == planned["weights_sha256"],
        report=str(folder / "report.html"),
        run=run,
    )
    console.print(plan_report(plan) if is_verbose() else plan_summary(plan))
    console.print(run_report(run) if is_verbose() else run_summary(run))
    console.print(comparison(outcomes))
    console.print(
        f"weights after {len(free['losses'])} steps: {'the same bits' if result.weights_equal else 'different'}"
    )
    console.print(f"report: {folder / 'report.html'}")
    if as_json:
        from msgspec.json import encode, format

        sys.stdout.buffer.write(format(encode(result, order="sorted"), indent=2) + b"\n")
    return status


def _free_run(folder: Path, arguments: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Runs the script in a fresh process with nothing applied; returns its peak and its log.

    The peak is the kernel's, or on a CUDA device the script's own, which nobody resets.
    """
    log = folder / "free.json"
    command = [sys.executable, str(_SCRIPT), *arguments, "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise UsageError(
            f"the demo's free run ended with status {process.returncode}; it needs about 2.2 GiB of memory, "
            "of a CUDA device where torch sees one"
        )
    record = json.loads(log.read_text())
    return record.get("device_peak_bytes", usage.ru_maxrss * 1024), record


def _planned_run(folder: Path, arguments: Sequence[str], budget_bytes: int) -> tuple[int, dict[str, Any]]:
    """Runs the same script as under `memwall run`, with trace and plan kept."""
    log = folder / "planned.json"
    command = [sys.executable, "-m", "memwall.cli.demo_run", str(budget_bytes), str(folder)]
    command += [*arguments, "--log", str(log)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment())
    if done.returncode not in (0, 5):
        raise _Failed(done.stderr.strip().removeprefix("memwall: "), done.returncode)
    return done.returncode, json.loads(log.read_text())


class _Failed(MemwallError):
    """Says that the run under the plan ended early; its own message and status are passed on."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def _environment() -> dict[str, str]:
    """Returns an environment in which both runs find this very memwall, installed or not."""
    home = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _main(arguments: Sequence[str]) -> int:
    """Does the second run: BUDGET FOLDER [SCRIPT ARGUMENTS]."""
    budget_bytes, folder = int(arguments[0]), Path(arguments[1])
    session = Session(budget_bytes=budget_bytes)
    try:
        status = run_script(str(_SCRIPT), arguments[2:], session)
    except MemwallError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    if session.trace is None or session.plan is None:
        return status or 1
    save_trace(session.trace, folder / "demo.trace")
    session.plan.save(folder / "plan.json")
    report = run_report_of(session)
    report.save(folder / "run.json")
    return status or (0 if report.within_budget else 5)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
