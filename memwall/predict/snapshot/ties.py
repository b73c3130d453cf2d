"""Which rule decided between free blocks of one size when a history was recorded: a replay under each of the three.

That is L1 of three levels of claim, a re-simulation: recorded settings, requests and segment addresses. The rule under
which every block lands where it was recorded is the recording's; often several are.
"""

from msgspec.structs import replace

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.addresses import recorded_addresses
from memwall.predict.cuda_allocator.allocator_events import ALLOC, EventTrace
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import TieRule, VersionProfile
from memwall.predict.snapshot.device_history import DeviceHistory

RELEASE_OF_RULE: dict[TieRule, str] = {"address": "2.11.0", "block": "2.12.0", "segment": "2.13.0"}
"""A release that decides ties so."""


def exact_tie_rules(
    recording: DeviceHistory,
    trace: EventTrace,
    settings: AllocatorSettings,
    profile: VersionProfile,
    *,
    capacity_bytes: int | None = None,
) -> tuple[tuple[TieRule, ...], str]:
    """Replays a recording under each rule, with its segments where they were.

    Args:
        trace: the recording's requests; allocations have the numbers of their events.
        settings: the recording's.
        profile: release whose allocator is simulated otherwise.
        capacity_bytes: what the device could give, where it ran out.

    Returns:
        The rules under which every block lands where it was recorded, and what came of it as a sentence.
    """
    held = recording.start.ranges
    if (
        settings.expandable_segments
        or any(event.action == "segment_map" for event in recording.events)
        or any(memory.is_expandable for memory in held)
    ):
        return (), "the rule for ties was not determined: where expandable segments begin is not recorded"
    addresses = [event.address for event in recording.events if event.action == "segment_alloc"]
    num_moved: dict[TieRule, int | None] = {}
    for rule in RELEASE_OF_RULE:
        device = CudaAllocator(
            settings,
            replace(profile, tie=rule),
            capacity_bytes=capacity_bytes,
            addresses=recorded_addresses(addresses),
        )
        num_moved[rule] = _num_moved(device, recording, trace)
    exact = tuple(rule for rule, count in num_moved.items() if count == 0)
    blocks = f"all {sum(event[0] == ALLOC for event in trace.events)} blocks where they were recorded"
    if len(exact) == 1:
        release = RELEASE_OF_RULE[exact[0]].removesuffix(".0")
        found = f": of the rules for ties only '{exact[0]}' (torch {release}) puts {blocks}"
    elif exact:
        rules = " and ".join(exact)
        found = f": the rule for ties is not distinguishable in this recording; {rules} put {blocks}"
    else:
        moved = ", ".join(f"{rule} {'other segments' if count is None else count}" for rule, count in num_moved.items())
        found = f" not reached: no rule for ties puts {blocks}; elsewhere are {moved}"
    return exact, f"L1 re-simulation{found}"


def _num_moved(device: CudaAllocator, recording: DeviceHistory, trace: EventTrace) -> int | None:
    """Counts the blocks that land elsewhere; None where the replay asks for other segments than were recorded."""
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
