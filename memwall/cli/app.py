"""Defines the command `memwall`: its list of commands, and where errors become messages and exit statuses."""

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, cast

import typer

import memwall
from memwall.cli import checkpoint, demo, diff, doctor, estimate, explain, export, profile, report, run, top, verify
from memwall.cli import plan as plan_command
from memwall.cli.options import PASS_ARGUMENTS
from memwall.cli.output import plain
from memwall.cli.verbosity import VerboseOption, set_verbosity, with_verbosity
from memwall.errors import MemwallError, OutOfMemoryError
from memwall.logs import log_to_standard_error, quiet_libraries
from memwall.units import format_bytes

# What libraries say there is for the script's author.
_RUNS_SCRIPTS = ("profile", "run")
_PATIENCE_SECONDS = 5.0
"""Time that threads of a script have to end once the command has failed: each meets the failure in its next step."""

app = typer.Typer(
    name="memwall",
    help="Make a PyTorch training run fit a byte budget, as fast as the hardware allows, with the same loss.",
    epilog="Exit status: 0 fits or done; 1 another rank failed; 2 bad input; 3 does not fit, or grew too much; 4 fits "
    "only inside the margin; 5 ran over the budget; 6 the disk failed or is full; otherwise the script's own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(with_verbosity(demo.demo))
app.command("doctor")(with_verbosity(doctor.doctor))
app.command("profile", context_settings=PASS_ARGUMENTS)(with_verbosity(profile.profile))
app.command("estimate")(with_verbosity(estimate.estimate))
app.command("plan")(with_verbosity(plan_command.plan))
app.command("run", context_settings=PASS_ARGUMENTS)(with_verbosity(run.run))
app.command("top")(with_verbosity(top.top))
app.command("verify")(with_verbosity(verify.verify))
app.command("explain")(with_verbosity(explain.explain))
app.command("diff")(with_verbosity(diff.diff))
app.command("report")(with_verbosity(report.report))
app.command("export")(with_verbosity(export.export))
app.command("checkpoint")(with_verbosity(checkpoint.checkpoint))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"memwall {memwall.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: VerboseOption = 0,
    local_rank: Annotated[
        str | None, typer.Option("--local_rank", hidden=True, help="The script's, from DeepSpeed's launcher.")
    ] = None,
) -> None:
    """Takes the options before the command."""
    ctx.obj = local_rank
    ctx.with_resource(log_to_standard_error())
    set_verbosity(verbose)
    if ctx.invoked_subcommand not in _RUNS_SCRIPTS:
        ctx.with_resource(quiet_libraries())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after `memwall`; by default those of the process.

    Returns:
        The exit status; docs/limits.md has the list.
    """
    try:
        status = _status_of(sys.argv[1:] if argv is None else list(argv))
    except MemwallError as error:
        # Not wrapped and not styled: paths and sizes in it are copied and searched for.
        typer.echo(plain(f"memwall: {error}"), err=True)
        status = error.exit_status
        if argv is None:
            _end_despite_threads(status)
    if argv is None and status == 128 + signal.SIGTERM:  # whoever gives arguments may have more to do after it
        from memwall.checkpoint.ending import process_is_over

        process_is_over()
    return status


def _end_despite_threads(status: int) -> None:
    """Has the process end soon, where threads of a script that has failed may wait for each other for ever."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        from memwall.checkpoint.deadline import exit_in

        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        exit_in(_PATIENCE_SECONDS, status)


def _status_of(words: list[str]) -> int:
    """Runs one command; returns its exit status."""
    try:
        if _is_plain_run(words):
            with log_to_standard_error():
                # The context is asked about options before SCRIPT, of which there are no others.
                run.run(cast(typer.Context, None), words[3:], budget=words[2])
        else:
            typer.main.get_command(app).main(args=words, prog_name="memwall")
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        typer.echo(stop.code, err=True)
        return 1
    except Exception as error:
        said = _out_of_memory(error)
        if said is None:
            raise
        typer.echo(said, err=True)
        return OutOfMemoryError.exit_status
    return 0


def _is_plain_run(words: Sequence[str]) -> bool:
    """Tells whether a command is `run --budget SIZE SCRIPT ...`, with nothing else before SCRIPT.

    typer reads options by pydantic, which takes 7 MiB and 0.2 s: as much again as all else that a small script gets.
    """
    is_run = len(words) > 3 and words[:2] == ["run", "--budget"]
    return is_run and (not words[3].startswith("-") or words[3] == "-m")


def _out_of_memory(error: Exception) -> str | None:
    """Returns what to say of memory that ran out outside of any script; None of any other failure."""
    from memwall.apply.memory.exhaustion import exhaustion_of
    from memwall.machine.meter import HostMeter

    found = exhaustion_of(error, "between steps", HostMeter())
    if found is None:
        return None
    asked = format_bytes(found.asked_bytes) if found.asked_bytes else "memory"
    return (
        f"memwall: out of memory outside any training step: {asked} could not be had while the process held "
        f"{format_bytes(found.held_bytes)}; give the process more memory"
    )
