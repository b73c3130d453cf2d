"""Measured beside predicted: the record that `memwall run --report` writes and `memwall verify` reads."""

from pathlib import Path
from typing import Literal, Self

import msgspec
from msgspec import Struct

from memwall.errors import PlanError, UsageError
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan, decoded
from memwall.trace.records import Tag
from memwall.versioned_files import FileKind, json_bytes, whole_file

_KIND = FileKind(
    noun="run report", schema="memwall.run", version=1, error=UsageError, way_out="run again with --report"
)


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what a run did."""

    tag: Tag = "cpu-measured"
    """Files that do not say are of runs on a CPU."""
    peak: PeakBytes
    """The peak of the whole run; on a CUDA device with the allocated and reserved bytes of the steps under the plan as
    torch counts them. On a CPU, allocated_bytes is what the process held beyond its base."""
    steady_peak_bytes: int = 0
    """Process bytes of the steps under the plan; on a CUDA device but for those of `proof_peak_bytes`, where there were
    others."""
    proof_peak_bytes: int = 0
    """Process bytes of the steps under the plan on a CUDA device in which its actions proved themselves, which takes of
    what the budget leaves; 0 elsewhere."""
    replaced_peak_bytes: int = 0
    """Process bytes of steps under plans that another one has replaced since; 0 where there were none."""
    first_step_peak_bytes: int
    """Process bytes of the recorded first step, which ran under the safest plan."""
    inactive_bytes: int | None = None
    """Bytes that the CUDA allocator held free between blocks in use, at most; null on a CPU."""
    others_bytes: int = 0
    """Bytes that other processes held on the device at the run's end, as far as its driver tells; no part of a peak."""
    num_alloc_retries: int | None = None
    """Requests that torch granted only after it had given its cache back, in the whole process; null on a CPU."""
    step_seconds_median: float | None
    steps: int
    oom_recoveries: int
    bytes_moved: dict[str, int]
    """Bytes moved to each tier over the whole run."""
    bytes_moved_per_step: int | None = None
    """Bytes that a step under the plan moved; None where there was none."""
    plan_seconds: float = 0.0
    """Time between the first and the second step: solving, replaying, applying."""
    num_replans: int = 0
    not_recomputed: dict[str, str] = {}
    """Blocks that the plan recomputes and the run did not, since they gave other results; with the reason."""
    lost: dict[str, str] = {}
    """Other actions of the plan, by kind and block, that the run found to change the training and dropped; with the
    reason."""
    unproven: dict[str, str] = {}
    """Actions, by kind, of which the run could not show that they leave the training as it is; with the reason."""
    not_itemised_bytes: int = 0
    """Process bytes of the steps' peak that no part of the forecast accounts for; negative if it foresaw more."""


class RankSpread(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how far the ranks of a run lie apart; peaks are process bytes of what has to keep to the budget."""

    num_ranks: int
    """Number of ranks, with those that did not report."""
    least_peak_bytes: int
    """Peak of the rank with the lowest one."""
    median_peak_bytes: int
    """Median of the ranks' peaks."""
    most_peak_bytes: int
    """Peak of the rank with the highest one."""
    least_rank: int
    """The rank with the lowest peak."""
    most_rank: int
    """The rank with the highest peak, which binds: the rest of the report is about it."""
    least_step_seconds: float | None
    """Median seconds of a step on the fastest rank; None where no step was timed."""
    most_step_seconds: float | None
    """Median seconds of a step on the slowest rank; None where no step was timed."""
    over_budget: tuple[int, ...]
    """Ranks that exceeded their budget."""
    without_report: tuple[int, ...]
    """Ranks that had ended, or did not end in time."""


class RunReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds one run under one plan."""

    schema: Literal["memwall.run/1"] = "memwall.run/1"
    script: str = ""
    """Names what trained as a person types it: `train.py` or `-m package.train`; "" where no command ran it."""
    plan_hash: str
    budget_bytes: int
    forecast: Forecast
    measured: Measured
    within_budget: bool
    """Whether the peak was, of several ranks that of each."""
    ranks: RankSpread | None = None
    """Spread over the ranks of a run; None where one process has trained."""

    @property
    def steady_peak_bytes(self) -> int:
        """Returns the process's peak in the steps under the plan; of the whole run where the file names no other."""
        return self.measured.steady_peak_bytes or self.measured.peak.process_bytes

    @property
    def judged_peak_bytes(self) -> int:
        """Returns the process's highest peak of all that has to keep to the budget."""
        return max(self.measured.peak.process_bytes, self.measured.first_step_peak_bytes)

    @property
    def outside_steps_bytes(self) -> int | None:
        """Returns the process's peak between and after the steps, where it is the highest: no forecast is about it."""
        overall_bytes = self.measured.peak.process_bytes
        measured = self.measured
        others = (measured.proof_peak_bytes, measured.replaced_peak_bytes, measured.first_step_peak_bytes)
        return overall_bytes if overall_bytes > max(self.steady_peak_bytes, *others) else None

    @property
    def unexplained_bytes(self) -> int:
        """Returns the bytes of the steps' peak that the forecast does not account for; negative if it foresaw more.

        That is `measured.not_itemised_bytes`, which older files do not have.
        """
        return self.steady_peak_bytes - self.forecast.steady_process_bytes

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON.

        Raises:
            UsageError: the file cannot be written.
        """
        with whole_file(Path(path)) as file:
            file.write(json_bytes(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a report.

        Raises:
            UsageError: no such file, cut short, not a report, of another version, or with a wrong field; the message
                names the file and the path inside it.
        """
        return _KIND.read_json(Path(path), lambda found: decoded(found, cls))

    @classmethod
    def from_json(cls, message: bytes) -> Self:
        """Returns a report that another rank has encoded."""
        return decoded(msgspec.json.decode(message), cls)


def load_pair(plan_path: Path, run_path: Path) -> RunReport:
    """Returns the report of a run under this plan.

    Raises:
        PlanError: the plan cannot be read, or the run followed another one.
        UsageError: the report cannot be read.
    """
    plan, report = Plan.load(plan_path), RunReport.load(run_path)
    if report.plan_hash != plan.plan_hash:
        raise PlanError(
            f"{run_path} is of a run under plan {report.plan_hash[:12]}, {plan_path} is plan {plan.plan_hash[:12]}; "
            "give the plan that the run used (memwall run --plan)"
        )
    measured = msgspec.structs.replace(report.measured, not_itemised_bytes=report.unexplained_bytes)
    return msgspec.structs.replace(report, measured=measured)
