"""The options of `memwall run`, and what they ask for once they are read and found to go together."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from memwall.cli.options import (
    DiskChoice,
    Script,
    parse_budget,
    parse_host,
    require_disk,
    require_file,
)
from memwall.errors import UsageError
from memwall.machine.launched import launched

BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="SIZE", help="What the process may use: 10GiB, 800MiB, 50%.")
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="plan.json", help="Use this plan instead of making one.")
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="run.json", help="Write forecast and measurement here; run.html is a page."),
]
MetricsOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics",
        metavar="FILE",
        help="Write each step's figures here as JSON lines, for memwall top; FILE.prom is for Prometheus, and a "
        "folder for TensorBoard.",
    ),
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="Commit every step into this folder.")
]
EveryOption = Annotated[
    int, typer.Option("--checkpoint-every", metavar="N", min=1, help="Commit every N-th step instead.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue from the last step in --checkpoint, if there is one.")
]
NprocOption = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="Start N processes by torchrun, each of which runs SCRIPT."),
]


class BytesBelow(Struct, frozen=True, kw_only=True):
    """Says what a run may take below its device; None for what is free there."""

    disk: str | None
    """The folder for offloaded bytes; None for the default one."""
    disk_bytes: int | None
    no_disk: bool
    """Whether no plan may write to the disk."""
    host_bytes: int | None


class RunRequest(Struct, frozen=True, kw_only=True):
    """Says what `memwall run` is asked for."""

    script: Script
    command: list[str]
    """SCRIPT and its arguments, as they were typed."""
    budget_bytes: int | None
    plan_path: Path | None
    below: BytesBelow
    allowed: tuple[str, ...]
    report_path: Path | None
    metrics_path: Path | None
    checkpoint_path: Path | None
    every: int
    is_resuming: bool
    as_json: bool

    def require_disk(self) -> None:
        """Finds out, before the script builds its model, whether bytes can leave memory, unless a folder was given.

        Raises:
            StoreError: they cannot.
        """
        if self.below.disk is None:
            require_disk()


def check_has_folder(checkpoint_path: Path | None, *, is_resuming: bool) -> None:
    """Checks that a run which goes on has the folder that it was committed into.

    Raises:
        UsageError: it has none.
    """
    if is_resuming and checkpoint_path is None:
        raise UsageError("run: --resume needs --checkpoint DIR, the folder that the run was committed into")


def budget_or_plan(budget: str | None, plan_path: Path | None) -> int | None:
    """Returns the bytes of the budget; None where a plan is given.

    Raises:
        UsageError: neither or both are given, the budget is no size, or the plan no file.
    """
    if (budget is None) == (plan_path is None):
        found = "neither" if budget is None else "both"
        raise UsageError(f"run: expected either --budget SIZE or --plan plan.json, found {found}")
    budget_bytes = None if budget is None else parse_budget(budget)
    if plan_path is not None:
        require_file(plan_path, expected="a plan written by memwall plan -o plan.json")
    return budget_bytes


def bytes_below(
    tier: DiskChoice | None,
    host: str | None,
    *,
    no_disk: bool,
    is_planned: bool,
    is_committed: bool,
) -> BytesBelow:
    """Returns what this rank may take below its device: each rank that a launcher started here has the same command.

    Args:
        is_planned: whether a plan is given.
        is_committed: whether steps are committed.

    Raises:
        UsageError: a text is no size, or `--no-disk` does not go with the rest.
    """
    if no_disk and is_planned:
        raise UsageError("run: --no-disk is for a plan that is made in the run; this one is given: --plan")
    if no_disk and is_committed:
        raise UsageError("run: --checkpoint writes each step that it commits to the disk; leave out --no-disk")
    host_bytes = parse_host(host)
    num_here = launched().num_local_ranks
    limit_bytes = None if tier is None else tier.limit_bytes
    return BytesBelow(
        disk=None if tier is None else str(tier.directory.absolute()),
        disk_bytes=None if limit_bytes is None else max(1, limit_bytes // num_here),
        no_disk=no_disk,
        host_bytes=None if host_bytes is None else max(1, host_bytes // num_here),
    )


def from_here(path: Path | None) -> Path | None:
    """Returns a path as it is meant where the run is started: its script may go to another folder."""
    return None if path is None else path.absolute()
