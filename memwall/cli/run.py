"""`memwall run`: run a script under a budget, or under a plan made earlier."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import (
    AllowOption,
    CommandArgument,
    DiskOption,
    HostOption,
    JsonOption,
    parse_allow,
    parse_budget,
    parse_command,
    parse_disk,
    parse_host,
    require_file,
    require_writable,
)
from memwall.errors import UsageError


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
    allow: AllowOption = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", metavar="run.json", help="Write forecast and measurement here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run SCRIPT so that it fits; its own exit status is passed on."""
    script = parse_command(command, ctx)
    if (budget is None) == (plan_path is None):
        found = "neither" if budget is None else "both"
        raise UsageError(f"run: expected either --budget SIZE or --plan plan.json, found {found}")
    budget_bytes = None if budget is None else parse_budget(budget)
    if plan_path is not None:
        require_file(plan_path, expected="a plan written by memwall plan -o plan.json")
    if report_path is not None:
        require_writable(report_path, option="--report")
    host_bytes, disk_tier, allowed = parse_host(host), parse_disk(disk), parse_allow(allow)
    from memwall.integrations.launcher import run_script

    status = run_script(
        script.target,
        script.arguments,
        budget_bytes=budget_bytes,
        plan_path=plan_path,
        host_bytes=host_bytes,
        disk=disk_tier,
        allow=allowed,
        report_path=report_path,
        as_json=as_json,
    )
    raise typer.Exit(status)
