"""Which rule decided between free blocks of one size when a history was recorded: a replay under each of the three.

That is L1 of three levels of claim, a re-simulation: recorded settings, requests and segment addresses. The rule under
which every block lands where it was recorded is the recording's; often several are.
"""

from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.addresses import recorded_addresses
from memwall.predict.cuda_allocator.allocator_events import ALLOC, EventTrace
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import TieRule, VersionProfile
from memwall.predict.snapshot.device_history import Recording

__all__ = ["RELEASE_OF_RULE", "TieCheck", "tie_check"]

RELEASE_OF_RULE: dict[TieRule, str] = {"address": "2.11.0", "block": "2.12.0", "segment": "2.13.0"}
"""A release that decides ties so."""


class TieCheck(Struct, frozen=True, kw_only=True):
    """How many blocks land elsewhere than recorded, under each rule."""

    num_addresses: int
    """Allocations of the recording."""
    num_moved: dict[TieRule, int | None]
    """None where the replay asked for other segments than were recorded."""
    reason: str
    """Why nothing was compared; "" if it was."""

    @property
    def exact(self) -> tuple[TieRule, ...]:
        """The rules under which every block lands where it was recorded."""
        return tuple(rule for rule, count in self.num_moved.items() if count == 0)

    @property
    def note(self) -> str:
        """What came of it, as a sentence."""
        if self.reason:
            return f"the rule for ties was not determined: {self.reason}"
        exact = self.exact
        if len(exact) == 1:
            release = RELEASE_OF_RULE[exact[0]].removesuffix(".0")
            return (
                f"L1 re-simulation: of the rules for ties only '{exact[0]}' (torch {release}) puts all "
                f"{self.num_addresses} blocks where they were recorded"
            )
        if exact:
            return (
                f"L1 re-simulation: the rule for ties is not distinguishable in this recording; "
                f"{' and '.join(exact)} put all {self.num_addresses} blocks where they were recorded"
            )
        moved = ", ".join(
            f"{rule} {'other segments' if count is None else count}" for rule, count in self.num_moved.items()
        )
        return (
            f"L1 re-simulation not reached: no rule for ties puts all {self.num_addresses} blocks where they were "
            f"recorded; elsewhere are {moved}"
        )


def tie_check(
    recording: Recording,
    trace: EventTrace,
    settings: AllocatorSettings,
    profile: VersionProfile,
    *,
    capacity_bytes: int | None = None,
) -> TieCheck:
    """Replays a recording under each rule, with its segments where they were.

    Args:
        trace: the recording's requests; allocations have the numbers of their events.
        settings: the recording's.
        profile: release whose allocator is simulated otherwise.
        capacity_bytes: what the device could give, where it ran out.
    """
    addresses = [event.address for event in recording.events if event.action == "segment_alloc"]
    num_addresses = sum(event[0] == ALLOC for event in trace.events)
    is_expandable = settings.expandable_segments or any(event.action == "segment_map" for event in recording.events)
    if is_expandable or any(held.is_expandable for held in recording.ranges):
        return TieCheck(
            num_addresses=num_addresses,
            num_moved={},
            reason="where expandable segments begin is not recorded",
        )
    moved: dict[TieRule, int | None] = {}
    for rule in get_args(TieRule):
        device = CudaAllocator(
            settings,
            replace(profile, tie=rule),
            capacity_bytes=capacity_bytes,
            addresses=recorded_addresses(addresses),
        )
        moved[rule] = _num_moved(device, recording, trace)
    return TieCheck(num_addresses=num_addresses, num_moved=moved, reason="")


def _num_moved(device: CudaAllocator, recording: Recording, trace: EventTrace) -> int | None:
    count = 0
    try:
        playback = Playback(device, trace.held)
        for event in trace.events:
            if not playback.run((event,)):
                return None
            action, number, _, _ = event
            if action == ALLOC and playback.live[number].address != recording.events[number].address:
                count += 1
    except UsageError:
        return None
    return count
