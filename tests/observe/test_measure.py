"""The report of a session says where its bytes went: to disk below a CPU's memory, to host memory below a device's."""

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from plans import a_plan

from memwall.observe.measure import run_report
from memwall.session.measurements import Measurements
from memwall.session.session import Session


@pytest.mark.parametrize(("device", "tier", "disk_bytes"), [("cpu", "disk", 7), ("cuda", "host", None)])
def test_the_tier_is_that_of_the_device(device: str, tier: str, disk_bytes: int | None) -> None:
    plan = a_plan(device=device)
    plan = msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, moved_bytes_per_step=7))
    session = SimpleNamespace(plan=plan, measured=Measurements(bytes_to_tier=14), budget_bytes=1 << 40)
    measured = run_report(cast(Session, session)).measured
    assert (measured.bytes_moved, measured.peak.disk_bytes) == ({tier: 14}, disk_bytes)
