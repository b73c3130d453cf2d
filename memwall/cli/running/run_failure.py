"""Writes a page about a `memwall run` that ran out of memory, where its report would be."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memwall.cli.running.run_request import RunRequest
from memwall.errors import OutOfMemoryError, UsageError
from memwall.machine.launched import launched

if TYPE_CHECKING:
    from memwall.session.session import Session


@contextmanager
def failure_page_after(request: RunRequest, session: "Session", *, is_committed: bool) -> Iterator[None]:
    """Writes a page where the report would be, if memory runs out within."""
    try:
        yield
    except OutOfMemoryError as error:
        if request.report_path is not None:
            words = _words_before(sys.argv[1:], request.command), request.command
            _save_failure_page(error, session, request.report_path, words, is_committed=is_committed)
        raise


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
        peak_bytes=session.measured.peak_bytes or session.measured.proof_peak_bytes,
        is_committed=is_committed,
    )
    path = report_path.with_name(rank_file_name(report_path.with_suffix(".html").name))
    try:
        save_page(page, path)
    except UsageError as failure:
        note(f"no page about the failure: {failure}")
    else:
        note(f"{path} shows what held the memory, and how to go on")
