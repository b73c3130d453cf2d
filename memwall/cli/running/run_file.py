"""Writes what a run was foreseen to hold and held: for scripts, or as a page where the file's name says so."""

from pathlib import Path
from typing import TYPE_CHECKING

from memwall.cli.options import require_writable

if TYPE_CHECKING:
    from memwall.observe.run_report import RunReport
    from memwall.report.html import Page


def is_page(path: Path) -> bool:
    """Returns whether a file is to be a page for a browser."""
    return path.suffix.lower() in (".html", ".htm")


def require_run_file(path: Path) -> None:
    """Checks before a run that its report can be written when it has ended.

    Raises:
        UsageError: there is no such folder, it is not writable, or what pages are made by is not installed.
    """
    require_writable(path, option="--report")
    if is_page(path):
        from memwall.report.page_libraries import require_page_libraries

        require_page_libraries()


def save_run(run: "RunReport", path: Path) -> None:
    """Writes the report.

    Raises:
        UsageError: the file cannot be written.
    """
    if is_page(path):
        from memwall.report.html import save_page

        save_page(run_page(run, path), path)
    else:
        run.save(path)


def run_page(run: "RunReport", path: Path) -> "Page":
    """Returns the page of a run, which is called as its script is, or as the file where the report names none."""
    from memwall.report.html import Page

    return Page(title=f"memwall run: {Path(run.script).name or path.name}", run=run)
