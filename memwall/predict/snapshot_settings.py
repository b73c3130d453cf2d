"""Which allocator settings would have held less: a snapshot's requests replayed through the simulated allocator.

Only a history that is whole can be replayed: from the first allocation on, in the default pools, and such that under
the recorded settings the simulated allocator holds what was recorded. Otherwise a note says why nothing is claimed.
"""

from itertools import pairwise

from msgspec.structs import replace

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.events import (
    ALLOC,
    EMPTY_CACHE,
    FINISH,
    FREE,
    RECORD_STREAM,
    Event,
    EventTrace,
)
from memwall.predict.cuda_allocator.replay import replay
from memwall.predict.cuda_allocator.search import search_settings
from memwall.predict.cuda_allocator.settings import format_settings, parse_settings
from memwall.predict.cuda_allocator.versions import profile_for
from memwall.predict.snapshot_analysis import DeviceAnalysis, SettingsSearch
from memwall.predict.snapshot_replay import Recording, recording_of, releases_of
from memwall.trace.snapshot_records import Snapshot
from memwall.units import format_bytes

__all__ = ["with_settings"]

# A replay that is further off tells nothing about other settings.
_MOST_ERROR = 0.05
_MISSING = "parts of the history are missing"


def with_settings(analysis: DeviceAnalysis, snapshot: Snapshot, torch_version: str) -> DeviceAnalysis:
    """The analysis of one device with the settings that would have held least, or with a note why none are named.

    Args:
        torch_version: whose allocator is simulated; a snapshot does not say which one wrote it.

    Raises:
        UsageError: the torch version cannot be read.
    """
    recording = recording_of(snapshot, analysis.device)
    recorded_bytes = analysis.reserved_peak.fragmentation.reserved_bytes
    reason = _not_whole(recording)
    trace = None if reason else _events(recording)
    if trace is None or not recorded_bytes:
        return _without(analysis, reason or _MISSING)
    profile, _ = profile_for(torch_version)
    try:
        recorded = parse_settings(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""), profile)
    except UsageError as error:
        return _without(analysis, f"the settings of the recording cannot be simulated: {error}")
    # Where the device ran out it had no more than was held then, and the replay must run out as well.
    capacity_bytes = recorded_bytes if analysis.num_retries else None
    replayed = replay(trace, recorded, profile, capacity_bytes=capacity_bytes)
    assert replayed is not None, "a replay without a bound is never broken off"
    if replayed.is_out_of_memory or abs(replayed.reserved_peak_bytes / recorded_bytes - 1) > _MOST_ERROR:
        return _without(
            analysis,
            f"a replay under the recorded settings holds {format_bytes(replayed.reserved_peak_bytes)}, the recording "
            f"{format_bytes(recorded_bytes)}; was it written by another release than torch {torch_version}?",
        )
    choice = search_settings(trace, torch_version, capacity_bytes=capacity_bytes)
    is_better = choice.fits and choice.figures.reserved_peak_bytes < replayed.reserved_peak_bytes
    search = SettingsSearch(
        torch_version=torch_version,
        recorded_settings=format_settings(recorded, profile),
        recorded_bytes=recorded_bytes,
        replayed_bytes=replayed.reserved_peak_bytes,
        best_settings=choice.text if is_better else format_settings(recorded, profile),
        best_bytes=choice.figures.reserved_peak_bytes if is_better else replayed.reserved_peak_bytes,
        lower_bound_bytes=choice.lower_bound_bytes,
        num_tried=choice.num_tried,
    )
    simulated = f"settings were compared on a simulation of the allocator of torch {torch_version}"
    return replace(analysis, settings=search, notes=(*analysis.notes, simulated, *choice.notes))


def _without(analysis: DeviceAnalysis, reason: str) -> DeviceAnalysis:
    return replace(analysis, notes=(*analysis.notes, f"no other allocator settings were compared: {reason}"))


def _not_whole(recording: Recording) -> str:
    """Why the requests of a recording are not all known; "" if they are."""
    if recording.ranges or recording.blocks:
        held_bytes = sum(held.num_bytes for held in recording.ranges)
        return (
            f"{format_bytes(held_bytes)} were held before the recording began, and how they came to lie there is not "
            "known; call torch.cuda.memory._record_memory_history(max_entries=...) before the model is built, with "
            "room for all events"
        )
    if recording.num_unmatched:
        return _MISSING
    if any(event.pool != (0, 0) for event in recording.events):
        return "private pools (CUDA graphs, MemPool) are not replayed"
    if not any(event.action == "free_requested" for event in recording.events):
        return "the history is too short, nothing was freed in it; record a whole training step or more"
    return ""


def _events(recording: Recording) -> EventTrace | None:
    """A recording that began with nothing as the requests of the program; None if it contradicts itself."""
    emptied = {release.last for release in releases_of(recording) if not release.is_retry}
    events: list[Event] = []
    number_of: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for number, (event, following) in enumerate(pairwise((*recording.events, None))):
        assert event is not None, "only the last of the pairs ends with nothing"
        address = event.address
        if event.action == "alloc":
            number_of[address] = number
            events.append((ALLOC, number, max(event.num_bytes, 1), event.stream))
        elif event.action == "free_requested":
            block = number_of.pop(address, None)
            if block is None:
                return None
            is_done = following is not None and (following.action, following.address) == ("free_completed", address)
            if not is_done:
                # Which other stream it waits for is not recorded, only until when.
                waiting[address] = block
                events.append((RECORD_STREAM, block, 0, event.stream + 1))
            events.append((FREE, block, 0, 0))
        elif event.action == "free_completed" and address in waiting:
            events.append((FINISH, waiting.pop(address), 0, 0))
        elif number in emptied:
            events.append((EMPTY_CACHE, 0, 0, 0))
    return EventTrace(events=tuple(events), steps=(0,))
