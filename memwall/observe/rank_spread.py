"""One report of all ranks of a run: that of the rank that held the most, and how far the others lie from it."""

from datetime import timedelta
from statistics import median

import msgspec

from memwall.machine.launched import launched
from memwall.observe.run_report import RankSpread, RunReport
from memwall.session.ranks.agreement import Ranks

_PATIENCE, _PATIENCE_AFTER_FAILURE = timedelta(seconds=60), timedelta(seconds=5)
"""Time that rank 0 waits for the others' reports: they end their scripts at about the same time."""


def rank_file_name(name: str) -> str:
    """Returns the name of a file that this process writes alone, where other ranks are given the same name."""
    here = launched()
    return name if here.num_ranks == 1 else f"rank{here.rank}-{name}"


def report_of_all(own: RunReport, ranks: Ranks, *, has_failed: bool) -> RunReport | None:
    """Returns the report of all ranks to rank 0, None to the others; for the end of a run.

    Args:
        has_failed: whether the script did, which may be since another rank has stopped: that one leaves no word.
    """
    told = ranks.told_at_end(msgspec.json.encode(own), _PATIENCE_AFTER_FAILURE if has_failed else _PATIENCE)
    if ranks.rank:
        return None
    reports = {rank: RunReport.from_json(message) for rank, message in told.items()}
    return spread_over(reports | {0: own}, ranks.num_ranks)


def spread_over(reports: dict[int, RunReport], num_ranks: int) -> RunReport:
    """Returns the report of the rank with the highest peak, with the spread over those that have reported."""
    least = min(reports, key=lambda rank: reports[rank].judged_peak_bytes)
    most = max(reports, key=lambda rank: reports[rank].judged_peak_bytes)
    seconds = [found for r in reports.values() if (found := r.measured.step_seconds_median) is not None]
    spread = RankSpread(
        num_ranks=num_ranks,
        least_peak_bytes=reports[least].judged_peak_bytes,
        median_peak_bytes=int(median(report.judged_peak_bytes for report in reports.values())),
        most_peak_bytes=reports[most].judged_peak_bytes,
        least_rank=least,
        most_rank=most,
        least_step_seconds=min(seconds, default=None),
        most_step_seconds=max(seconds, default=None),
        over_budget=tuple(sorted(rank for rank, report in reports.items() if not report.within_budget)),
        without_report=tuple(rank for rank in range(num_ranks) if rank not in reports),
    )
    is_within = all(report.within_budget for report in reports.values())
    return msgspec.structs.replace(reports[most], within_budget=is_within, ranks=spread)
