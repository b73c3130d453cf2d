"""Writes what a run was foreseen to hold and held: for scripts, or as a page where the file's name says so."""

from pathlib import Path
from typing import TYPE_CHECKING

from memwall.cli.options import require_writable
from memwall.errors import UsageError

if TYPE_CHECKING:
    from memwall.observe.run_report import RunReport
    from memwall.planning.planfile import Plan
    from memwall.report.html import Page
    from memwall.trace.records import Trace


def is_page(path: Path) -> bool:
    """Returns whether a file is to be a page for a browser."""
    return path.suffix.lower() in (".html", ".htm")


def require_page_file(path: Path) -> None:
    """Checks before planning that a page can be written.

    Raises:
        UsageError: it is called otherwise, or what `require_run_file` says.
    """
    if not is_page(path):
        raise UsageError(f"--report {path}: a plan's page is for a browser; expected a name that ends with .html")
    require_run_file(path)


def require_run_file(path: Path) -> None:
    """Checks before a run that its report can be written when it has ended.

    Raises:
        UsageError: there is no such folder, it is not writable, or what pages are made by is not installed.
    """
    require_writable(path, option="--report")
    if is_page(path):
        from memwall.report.page_libraries import require_page_libraries

        require_page_libraries()


def save_run(run: "RunReport", path: Path, plan: "Plan | None", trace: "Trace | None") -> None:
    """Writes the report.

    Args:
        plan: the one in effect.
        trace: of the step that it was made from; None where it was given.

    Raises:
        UsageError: the file cannot be written.
    """
    if is_page(path):
        from memwall.report.html import save_page

        save_page(run_page(run, path, plan, trace), path)
    else:
        run.save(path)


def run_page(run: "RunReport", path: Path, plan: "Plan | None" = None, trace: "Trace | None" = None) -> "Page":
    """Returns the page of a run, which is called as its script is, or as the file where the report names none."""
    from memwall.report.plan_page import plan_page

    return plan_page(f"memwall run: {Path(run.script).name or path.name}", plan, trace, run)
