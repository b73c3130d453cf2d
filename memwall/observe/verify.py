"""Brings a plan and the report of a run together, and refuses pairs that do not belong to each other."""

from pathlib import Path

import msgspec

from memwall.errors import PlanError
from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan

__all__ = ["load_pair"]


def load_pair(plan_path: Path, run_path: Path) -> RunReport:
    """The report of a run under this plan.

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
