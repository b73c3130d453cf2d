"""Runs `memwall run`: a script under a budget, or under a plan made earlier."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer
from msgspec.structs import replace

from memwall.cli.options import (
    AllowOption,
    CommandArgument,
    DiskOption,
    HostOption,
    JsonOption,
    ModeOption,
    NoDiskOption,
    parse_allow,
    parse_command,
    parse_disk,
)
from memwall.cli.ranks import check_no_launcher, run_by_torchrun
from memwall.cli.running.run_end import end_run
from memwall.cli.running.run_failure import failure_page_after
from memwall.cli.running.run_file import require_run_file
from memwall.cli.running.run_request import (
    BudgetOption,
    CheckpointOption,
    EveryOption,
    MetricsOption,
    NprocOption,
    PlanOption,
    ReportOption,
    ResumeOption,
    RunRequest,
    budget_or_plan,
    bytes_below,
    check_has_folder,
    from_here,
)
from memwall.cli.verbosity import is_verbose
from memwall.machine.launched import launched

if TYPE_CHECKING:
    from memwall.checkpoint.step_checkpoint import StepCheckpoint
    from memwall.planning.planfile import Plan
    from memwall.session.next_budget import NextBudget
    from memwall.session.session import Session


def run(
    ctx: typer.Context,
    command: CommandArgument,
    budget: BudgetOption = None,
    plan_path: PlanOption = None,
    host: HostOption = None,
    disk: DiskOption = None,
    no_disk: NoDiskOption = False,
    allow: AllowOption = None,
    mode: ModeOption = None,
    report_path: ReportOption = None,
    metrics_path: MetricsOption = None,
    checkpoint_path: CheckpointOption = None,
    every: EveryOption = 1,
    resume: ResumeOption = False,
    num_processes: NprocOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run SCRIPT so that it fits; its own exit status is passed on. -v shows the whole plan and every figure."""
    check_no_launcher(command)
    script = parse_command(command, ctx)
    if ctx is not None and ctx.obj is not None:  # what DeepSpeed's launcher puts first belongs to the script
        script = replace(script, arguments=(f"--local_rank={ctx.obj}", *script.arguments))
    if num_processes is not None:
        raise typer.Exit(run_by_torchrun(num_processes, sys.argv[1:]))
    check_has_folder(checkpoint_path, is_resuming=resume)
    budget_bytes = budget_or_plan(budget, plan_path)
    if report_path is not None:
        require_run_file(report_path)
    tier, allowed = parse_disk(disk), parse_allow(allow, mode)
    is_planned, is_committed = plan_path is not None, checkpoint_path is not None
    request = RunRequest(
        script=script,
        command=command,
        budget_bytes=budget_bytes,
        plan_path=plan_path,
        below=bytes_below(tier, host, no_disk=no_disk, is_planned=is_planned, is_committed=is_committed),
        allowed=allowed,
        report_path=from_here(report_path),
        metrics_path=from_here(metrics_path),
        checkpoint_path=from_here(checkpoint_path),
        every=every,
        is_resuming=resume,
        as_json=as_json,
    )
    _run_as_is_with_ample_room(request)
    _run_under_a_session(request)


def _run_as_is_with_ample_room(request: RunRequest) -> None:
    """Runs a script that nobody wants to know more of as it is, and ends the command, where it has room to spare."""
    import torch

    is_asked_for_figures = request.as_json or is_verbose() or request.report_path or request.metrics_path
    here, budget_bytes = launched(), request.budget_bytes
    is_alone = max(here.num_ranks, here.num_local_ranks) == 1 and not torch.cuda.is_available()
    if budget_bytes is None or not is_alone or is_asked_for_figures or request.checkpoint_path or request.allowed:
        return
    from memwall.cli.running.run_as_is import run_as_is
    from memwall.integrations.scripts.ample_room import has_ample_room

    if has_ample_room(budget_bytes):
        request.require_disk()  # for the run that turns out to need a plan
        run_as_is(
            request.script,
            lambda begin_peak_bytes: _open_session(request, begin_peak_bytes=begin_peak_bytes),
            budget_bytes=budget_bytes,
            disk=request.below.disk,
            disk_bytes=request.below.disk_bytes,
        )


def _run_under_a_session(request: RunRequest) -> None:
    """Runs a script with what is asked for around it, and ends the command."""
    from memwall.cli.output import note, script_output
    from memwall.integrations.launcher import run_script
    from memwall.machine.device_sharers import note_sharers
    from memwall.planning.planfile import Plan
    from memwall.report.summary import commits_line
    from memwall.session.next_budget import read_next_budget

    note_sharers()
    given = None if request.plan_path is None else Plan.load(request.plan_path)
    with ExitStack() as opened:
        checkpoint = _open_checkpoint(request, opened)
        following = None
        if request.is_resuming and request.checkpoint_path is not None:
            following = read_next_budget(request.checkpoint_path, request.budget_bytes)
        if given is None and checkpoint is not None and following is None:
            given = checkpoint.plan_for(request.budget_bytes)
        _prepare_device(request, given)
        session = _open_session(request, given, following)
        _write_metrics(request, session, 0 if checkpoint is None else checkpoint.resumed_steps, opened)
        page = failure_page_after(request, session, is_committed=checkpoint is not None)
        with page, script_output(to_error=request.as_json):
            status = run_script(
                request.script.name,
                request.script.arguments,
                session,
                is_module=request.script.is_module,
                checkpoint=checkpoint,
                is_last=True,
                num_failures=0 if following is None else following.num_failures,
            )
        if checkpoint is not None and checkpoint.times.num_commits:
            note(commits_line(checkpoint.directory, checkpoint.times))
    report_path, as_json = request.report_path, request.as_json
    end_run(
        session, request.script, status, given=given, checkpoint=checkpoint, report_path=report_path, as_json=as_json
    )


def _open_session(
    request: RunRequest,
    given: "Plan | None" = None,
    following: "NextBudget | None" = None,
    begin_peak_bytes: int | None = None,
) -> "Session":
    """Returns a session whose plan is shown as soon as it stands.

    Args:
        given: a plan made earlier.
        following: the budget that a run which ran out of memory has left.
        begin_peak_bytes: the most that the process held before its script; None for until now.
    """
    from memwall.cli.output import note
    from memwall.report.summary import plan_summary
    from memwall.report.text import plan_report
    from memwall.session.session import Session

    session = Session(
        budget_bytes=request.budget_bytes if given is None else None,
        plan=given,
        disk=request.below.disk,
        disk_capacity_bytes=request.below.disk_bytes,
        no_disk=request.below.no_disk,
        allow=request.allowed,
        within_bytes=None if following is None else following.within_bytes,
        host_capacity_bytes=request.below.host_bytes,
        begin_peak_bytes=begin_peak_bytes,
    )
    shown = plan_report if is_verbose() else plan_summary
    session.on_plan = lambda ready: (
        note(shown(ready.plan)) if ready.plan is not None and not (ready.ranks and ready.ranks.rank) else None
    )
    return session


def _open_checkpoint(request: RunRequest, opened: ExitStack) -> "StepCheckpoint | None":
    """Returns what steps are committed into, if that is asked for, and says what is resumed from."""
    if request.checkpoint_path is None:
        return None
    from memwall.checkpoint.resumption import open_checkpoint
    from memwall.cli.output import note
    from memwall.report.summary import recovery_line
    from memwall.session.ranks.agreement import Ranks

    checkpoint = open_checkpoint(
        request.checkpoint_path, every=request.every, is_resuming=request.is_resuming, meet=Ranks.meet
    )
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
    return checkpoint


def _prepare_device(request: RunRequest, given: "Plan | None") -> None:
    """Sets what has to be set before CUDA begins, and finds out whether a plan's bytes can leave memory."""
    import torch

    from memwall.apply.technique import handler_of

    for action in given.actions if given is not None else ():
        handler_of(action).before_cuda()
    # What has a tier moves bytes there; on CUDA they leave for host memory instead of the disk.
    needs_disk = given is None or any("tier" in action.__struct_fields__ for action in given.actions)
    if needs_disk and not torch.cuda.is_available():
        request.require_disk()


def _write_metrics(request: RunRequest, session: "Session", num_steps_before: int, opened: ExitStack) -> None:
    """Has the figures of each step written, if that is asked for, counted on from the run that is resumed."""
    if request.metrics_path is None:
        return
    from msgspec.structs import replace

    from memwall.observe.step_metrics_files import open_metrics

    metrics = open_metrics(request.metrics_path, appends=request.is_resuming)
    opened.callback(metrics.close)
    session.on_step = lambda of_step: metrics.write(replace(of_step, step=num_steps_before + of_step.step))
