"""Runs a script that may have room to spare for `memwall run`: as it is, until it turns out that it needs a plan."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from memwall.cli.options import Script
from memwall.cli.running.run_end import end_run, end_run_as_it_is
from memwall.integrations.scripts.ample_room import AmpleRoom
from memwall.integrations.scripts.execution import execute
from memwall.machine.meter import process_peak_bytes

if TYPE_CHECKING:
    from memwall.errors import MemwallError
    from memwall.integrations.launcher import ScriptRun
    from memwall.session.session import Session


def run_as_is(
    script: Script,
    open_session: Callable[[int | None], "Session"],
    *,
    budget_bytes: int,
    disk: str | None,
    disk_bytes: int | None,
) -> NoReturn:
    """Runs a script as it is, and ends the command.

    Args:
        open_session: makes the session under which the script goes on where it needs one; called with the most bytes
            that the process held before the script, where the first step is the session's, and otherwise with None.
        disk: the folder for offloaded bytes; None for the default one.
        disk_bytes: the most to take of it; None for what is free there.

    Raises:
        MemwallError: see `run_script`, where the script needs a plan.
    """
    planned: ScriptRun | None = None

    def take_over(called: nn.Module | None) -> None:
        nonlocal planned
        from memwall.integrations.launcher import ScriptRun  # 25 MiB and a second, for which there may be no need

        # What the script has held until now comes before its first step in the next run as well.
        session = open_session(None if room.num_steps else room.begin_peak_bytes)
        planned = ScriptRun(script.name, session, is_last=True, has_trained=room.has_trained)
        if called is not None:  # the hooks just made are not in the list this call is going through
            planned.watch.before_forward(called)

    def explained(error: BaseException) -> "MemwallError | None":
        return room.explained(error) if planned is None else planned.session.explained(error)

    room = AmpleRoom(script.name, budget_bytes, take_over=take_over, disk=disk, disk_capacity_bytes=disk_bytes)
    status = 1
    room.start()
    try:
        status = execute(
            script.name, script.arguments, is_module=script.is_module, explained=explained, has_budget=True
        )
    finally:
        room.close()
        if planned is not None:
            planned.close(status)
    if planned is None:
        room.check(status)
    else:
        planned.check(status)
        if planned.session.measured.num_steps or not room.num_steps:
            end_run(planned.session, script, status)
    end_run_as_it_is(script, status, budget_bytes=budget_bytes, peak_bytes=process_peak_bytes(), has_told=room.has_told)
