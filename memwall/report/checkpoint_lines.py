"""Says what a run's commits cost, and what it took to continue from one, in a line each."""

from memwall.checkpoint.writer import CommitTimes
from memwall.units import format_bytes, format_seconds


def recovery_line(directory: str, *, step: int, num_bytes: int, seconds: float) -> str:
    """Returns the line of a run that goes on."""
    return (
        f"{directory}: step {step} was read and verified, {format_bytes(num_bytes)} in {format_seconds(seconds)}; the "
        "run continues from there"
    )


def commits_line(directory: str, times: CommitTimes) -> str:
    """Returns the line of a process that has committed something; writing and recording go on beside the next step."""
    number = times.num_commits
    written, recorded = times.transfer_seconds / number, times.record_seconds / number
    return (
        f"{directory}: {number} {'commit' if number == 1 else 'commits'} of "
        f"{format_bytes(times.written_bytes / number)}, each {format_seconds(written)} to write and "
        f"{format_seconds(recorded)} to record and sync"
    )
