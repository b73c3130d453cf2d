"""Runs `memwall run`: a script under a budget, or under a plan made earlier."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import (
    AllowOption,
    CommandArgument,
    DiskOption,
    DiskWritesOption,
    HostOption,
    JsonOption,
    ModeOption,
    NoDiskOption,
    parse_allow,
    parse_budget,
    parse_command,
    parse_disk,
    parse_disk_writes,
    parse_host,
    require_disk,
    require_file,
    require_writable,
)
from memwall.cli.ranks import check_no_launcher, run_by_torchrun
from memwall.cli.run_end import end_run
from memwall.cli.verbosity import is_verbose
from memwall.errors import OutOfMemoryError, UsageError
from memwall.machine.launched import launched

if TYPE_CHECKING:
    from memwall.planning.planfile import Plan
    from memwall.session.session import Session


def run(
    ctx: typer.Context,
    command: CommandArgument,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="What the process may use: 10GiB, 800MiB, 50%.")
    ] = None,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", metavar="plan.json", help="Use this plan instead of making one.")
    ] = None,
    host: HostOption = None,
    disk: DiskOption = None,
    disk_writes: DiskWritesOption = None,
    no_disk: NoDiskOption = False,
    allow: AllowOption = None,
    mode: ModeOption = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", metavar="run.json", help="Write forecast and measurement here.")
    ] = None,
    metrics_path: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            help="Write each step's figures here as JSON lines, for memwall top; FILE.prom is for Prometheus, and a "
            "folder for TensorBoard.",
        ),
    ] = None,
    checkpoint_path: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Commit every step into this folder.")
    ] = None,
    every: Annotated[
        int, typer.Option("--checkpoint-every", metavar="N", min=1, help="Commit every N-th step instead.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last step in --checkpoint, if there is one.")
    ] = False,
    history_path: Annotated[
        Path | None,
        typer.Option(
            "--history", metavar="DIR", help="Record the CUDA allocator; write a snapshot if memory runs out."
        ),
    ] = None,
    history_at_end: Annotated[
        bool, typer.Option("--history-at-end", help="With --history: write one at the end of the run as well.")
    ] = False,
    num_processes: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Start N processes by torchrun, each of which runs SCRIPT."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run SCRIPT so that it fits; its own exit status is passed on. -v shows the whole plan and every figure."""
    check_no_launcher(command)
    script = parse_command(command, ctx)
    if num_processes is not None:
        raise typer.Exit(run_by_torchrun(num_processes, sys.argv[1:]))
    if resume and checkpoint_path is None:
        raise UsageError("run: --resume needs --checkpoint DIR, the folder that the run was committed into")
    if history_at_end and history_path is None:
        raise UsageError("run: --history-at-end needs --history DIR, the folder that the snapshot is written into")
    if (budget is None) == (plan_path is None):
        found = "neither" if budget is None else "both"
        raise UsageError(f"run: expected either --budget SIZE or --plan plan.json, found {found}")
    budget_bytes = None if budget is None else parse_budget(budget)
    if plan_path is not None:
        require_file(plan_path, expected="a plan written by memwall plan -o plan.json")
    if report_path is not None:
        require_writable(report_path, option="--report")
    disk_tier, allowed = parse_disk(disk), parse_allow(allow, mode)
    host_bytes, disk_bytes_per_day = parse_host(host), parse_disk_writes(disk_writes, no_disk=no_disk)
    if disk_bytes_per_day is not None and plan_path is not None:
        raise UsageError("run: --disk-writes is for a plan that is made in the run; this one is given: --plan")
    if disk_bytes_per_day is not None and checkpoint_path is not None:
        raise UsageError(
            "run: --disk-writes limits what a plan writes, and --checkpoint writes each step that it commits besides, "
            "which is not counted; leave out one of them (--checkpoint-every N commits fewer steps)"
        )
    # A script may go to another folder, and what it was started with is meant from here.
    checkpoint_path, report_path, history_path = map(_from_here, (checkpoint_path, report_path, history_path))
    metrics_path = _from_here(metrics_path)
    # Each rank that a launcher started here is given the same command.
    disk_path = None if disk_tier is None else str(disk_tier.directory.absolute())
    limit_bytes = None if disk_tier is None else disk_tier.limit_bytes
    num_here = launched().num_local_ranks
    disk_bytes = None if limit_bytes is None else max(1, limit_bytes // num_here)
    host_bytes = None if host_bytes is None else max(1, host_bytes // num_here)

    def open_session(given: "Plan | None" = None, within_bytes: int | None = None) -> "Session":
        from memwall.cli.output import note
        from memwall.report.summary import plan_summary
        from memwall.report.text import plan_report
        from memwall.session.session import Session

        session = Session(
            budget_bytes=budget_bytes if given is None else None,
            plan=given,
            disk=disk_path,
            disk_capacity_bytes=disk_bytes,
            disk_bytes_per_day=disk_bytes_per_day,
            allow=allowed,
            within_bytes=within_bytes,
            host_capacity_bytes=host_bytes,
        )
        shown = plan_report if is_verbose() else plan_summary
        session.on_plan = lambda ready: (
            note(shown(ready.plan)) if ready.plan is not None and not (ready.ranks and ready.ranks.rank) else None
        )
        return session

    import torch

    is_asked_for_figures = as_json or is_verbose() or report_path or metrics_path or history_path
    is_alone = max(launched().num_ranks, num_here) == 1 and not torch.cuda.is_available()
    if budget_bytes is not None and is_alone and not (is_asked_for_figures or checkpoint_path or allowed):
        from memwall.cli.run_as_is import has_ample_room, run_as_is

        if has_ample_room(budget_bytes):
            if disk_tier is None:
                require_disk()  # for the run that turns out to need a plan
            run_as_is(script, open_session, budget_bytes=budget_bytes, disk=disk_path, disk_bytes=disk_bytes)

    from msgspec.structs import replace

    from memwall.apply.technique import handler_of
    from memwall.checkpoint.resumption import open_checkpoint
    from memwall.cli.output import note, script_output
    from memwall.integrations.launcher import run_script
    from memwall.observe.history import MemoryHistory
    from memwall.observe.step_metrics_files import open_metrics
    from memwall.planning.planfile import Plan
    from memwall.report.checkpoint_lines import commits_line, recovery_line
    from memwall.session.next_budget import read_next_budget
    from memwall.session.ranks.agreement import Ranks

    given = None if plan_path is None else Plan.load(plan_path)
    with ExitStack() as opened:
        checkpoint = None
        if checkpoint_path is not None:
            checkpoint = open_checkpoint(checkpoint_path, every=every, is_resuming=resume, meet=Ranks.meet)
            opened.callback(checkpoint.close, completed=False)
            if not checkpoint.is_new:
                note(
                    recovery_line(
                        checkpoint.directory,
                        step=checkpoint.resumed_steps,
                        num_bytes=checkpoint.recovered_bytes,
                        seconds=checkpoint.recovery_seconds,
                    )
                )
        following = read_next_budget(checkpoint_path, budget_bytes) if resume and checkpoint_path is not None else None
        if given is None and checkpoint is not None and following is None:
            given = checkpoint.plan_for(budget_bytes)
        for action in given.actions if given is not None else ():
            handler_of(action).before_cuda()
        # What has a tier moves bytes there.
        needs_disk = given is None or any("tier" in action.__struct_fields__ for action in given.actions)
        if needs_disk and disk_tier is None and not torch.cuda.is_available():
            # Found out before the script builds its model; on CUDA bytes leave for host memory instead.
            require_disk()
        session = open_session(given, None if following is None else following.within_bytes)
        history = None
        if history_path is not None:
            # Before the script builds its model: what is there already has no stack.
            history = MemoryHistory(history_path, is_written_at_end=history_at_end)
            history.begin(is_step_recorded=given is None)
        if metrics_path is not None:
            before = 0 if checkpoint is None else checkpoint.resumed_steps
            metrics = open_metrics(metrics_path, appends=resume)
            opened.callback(metrics.close)
            session.on_step = lambda of_step: metrics.write(replace(of_step, step=before + of_step.step))
        try:
            with script_output(to_error=as_json):
                status = run_script(
                    script.name,
                    script.arguments,
                    session,
                    is_module=script.is_module,
                    checkpoint=checkpoint,
                    history=history,
                    is_last=True,
                    num_failures=0 if following is None else following.num_failures,
                )
        except OutOfMemoryError as error:
            if report_path is not None:
                words = _words_before(sys.argv[1:], command), command
                _save_failure_page(error, session, report_path, words, is_committed=checkpoint is not None)
            raise
        if checkpoint is not None and checkpoint.times.num_commits:
            note(commits_line(checkpoint.directory, checkpoint.times))
    end_run(session, script, status, given=given, checkpoint=checkpoint, report_path=report_path, as_json=as_json)


def _words_before(arguments: list[str], command: list[str]) -> list[str]:
    """Returns memwall's own words of a command line, those before SCRIPT; none where it is not this run's.

    >>> _words_before(["run", "--budget", "1GiB", "train.py", "--budget", "7"], ["train.py", "--budget", "7"])
    ['run', '--budget', '1GiB']
    >>> _words_before(["-q", "tests"], ["train.py"])
    []
    """
    own = arguments[: len(arguments) - len(command)]
    return own if arguments[len(own) :] == command and "run" in own else []


def _save_failure_page(
    error: OutOfMemoryError,
    session: "Session",
    report_path: Path,
    words: tuple[list[str], list[str]],
    *,
    is_committed: bool,
) -> None:
    """Writes a page where the report would be; one that cannot be written leaves the error as it is."""
    from memwall.cli.output import note
    from memwall.machine.launched import launched
    from memwall.observe.rank_spread import rank_file_name
    from memwall.report.failure_page import failure_page
    from memwall.report.html import save_page

    page = failure_page(
        error,
        words=words[0],
        script=words[1],
        is_launched=launched().by_launcher,
        plan=session.plan,
        trace=session.trace,
        peak_bytes=session.measured.peak_bytes,
        is_committed=is_committed,
    )
    path = report_path.with_name(rank_file_name(report_path.with_suffix(".html").name))
    try:
        save_page(page, path)
    except UsageError as failure:
        note(f"no page about the failure: {failure}")
    else:
        note(f"{path} shows what held the memory, and how to go on")


def _from_here(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()
