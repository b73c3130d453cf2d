"""Runs of transformers' Trainer: arguments that write nothing, and what a recorded run is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings

__all__ = ["MIB", "NUM_STEPS", "Recorded", "arguments", "with_actions"]

MIB = 1 << 20
NUM_STEPS = 3


def arguments(kind: Any, **settings: Any) -> Any:
    """Training arguments that write nothing and talk to nobody."""
    values = {"output_dir": "unused", "max_steps": NUM_STEPS, "save_strategy": "no", "logging_strategy": "no"}
    return kind(**{**values, "report_to": "none", "disable_tqdm": True, "use_cpu": True, **settings})


@dataclass
class Recorded:
    """One run under a budget that needs nothing: what it learned, and plans made from its trace."""

    digest: str
    session: Any

    def plan(self, *, below_plain: int) -> Plan:
        """A plan for a budget so far below the plain peak."""
        plain_bytes = self.session.plan.forecast.plain_peak.process_bytes
        return make_plan(self.session.trace, Settings(budget_bytes=plain_bytes - below_plain))


def with_actions(plan: Plan, actions: Sequence[Action]) -> Plan:
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, actions=tuple(actions)))
