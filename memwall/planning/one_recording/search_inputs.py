"""The inputs that all candidates of a search share: the recorded step, the process model, and the disk."""

import copy

from memwall.planning.blocks import find_blocks
from memwall.planning.location import Location
from memwall.planning.settings import Settings
from memwall.predict.device import DeviceModel
from memwall.predict.live_device import live_process
from memwall.predict.process import Process
from memwall.predict.timing import first_touch_seconds, smoothed
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step


class SearchInputs:
    """Holds a trace and what is asked of it.

    Attributes:
        process: replays a step on this machine, or on the device that the trace was translated to.
        steady: the recorded step that counts, its seconds smoothed.
        plain_fault_seconds: of its seconds, what another way of reusing memory can save.
    """

    def __init__(self, trace: Trace, settings: Settings, process: Process | None = None) -> None:
        self.trace, self.settings = trace, settings
        if process is None:
            hardware = settings.hardware
            process = live_process(trace, settings.held) if hardware is None else DeviceModel(trace, hardware)
        self.process: Process = process
        recorded = steady_step(trace)
        self.steady = smoothed(recorded, find_blocks(trace, recorded))
        self.plain_fault_seconds = min(
            self.process.untreated(self.steady).fault_seconds,
            first_touch_seconds(self.steady, trace.names, trace.machine.fault_seconds_per_byte),
        )

    def under(self, settings: Settings) -> "SearchInputs":
        """Returns the inputs with other settings that change nothing of the step."""
        found = copy.copy(self)
        found.settings = settings
        return found

    @property
    def capacity_bytes(self) -> int:
        """Returns the bytes of the next tier that a plan may take."""
        tier = self.trace.machine.next_tier
        return self.settings.tier_capacity_bytes or (0 if tier is None else tier.free_bytes)

    @property
    def may_write(self) -> bool:
        """Tells whether steps may have bytes leave memory: not for a disk that nothing may be written to."""
        return not (self.settings.no_disk and self.process.next_tier == "disk")

    def allows(self, location: Location) -> bool:
        """Tells whether steps may have state and parameters there."""
        return self.may_write or location.written_bytes <= 0

    def limit_bytes(self, *, has_margin: bool) -> int:
        """Returns the process bytes that a plan may use: the budget, less the forecast's error if that is to fit."""
        budget_bytes = self.settings.budget_bytes
        return budget_bytes - (self.process.margin_bytes(budget_bytes) if has_margin else 0)
