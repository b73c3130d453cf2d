"""Which allocator settings would have held less: a snapshot's requests replayed through the simulated allocator.

A history that began late starts from what was held then, as it lay. It must have no gaps, stay in the default pools,
and under the recorded settings the simulated allocator must hold what was recorded; otherwise a note says why nothing
is claimed.
"""

from itertools import pairwise

from msgspec.structs import replace

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    FREE,
    FREE_LATER,
    Event,
    EventTrace,
)
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings, format_settings, parse_settings
from memwall.predict.cuda_allocator.event_replay import replay
from memwall.predict.cuda_allocator.settings_search import search_settings
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.snapshot.analysis import DeviceAnalysis, SettingsSearch
from memwall.predict.snapshot.device_history import DeviceHistory, recording_of, releases_of
from memwall.trace.snapshot.records import Snapshot
from memwall.units import format_bytes

# A replay that is further off tells nothing about other settings.
_MOST_ERROR = 0.05
_MISSING = "parts of the history are missing"


def with_settings(
    analysis: DeviceAnalysis,
    snapshot: Snapshot,
    torch_version: str,
    *,
    recording: DeviceHistory | None = None,
) -> DeviceAnalysis:
    """Adds to the analysis of one device the settings that would have held least, or a note why none are named.

    Args:
        torch_version: whose allocator is simulated; a snapshot does not say which one wrote it.
        recording: of this device, where it was made before.

    Raises:
        UsageError: the torch version cannot be read.
    """
    recording = recording or recording_of(snapshot, analysis.device)
    recorded_bytes = analysis.reserved_peak.fragmentation.reserved_bytes
    reason = _unusable(recording)
    if reason:
        return _without(analysis, reason)
    profile, _ = profile_for(torch_version)
    try:
        recorded = parse_settings(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""), profile)
    except UsageError as error:
        return _without(analysis, f"the settings of the recording cannot be simulated: {error}")
    trace = events_of_recording(recording, recorded)
    if trace is None or not recorded_bytes:
        return _without(analysis, _MISSING)
    # Where the device ran out it had no more than was held then, and the replay must run out as well.
    capacity_bytes = recorded_bytes if analysis.num_retries else None
    try:
        replayed = replay(trace, recorded, profile, capacity_bytes=capacity_bytes)
    except UsageError:
        return _without(analysis, _MISSING)
    if replayed.is_out_of_memory or abs(replayed.reserved_peak_bytes / recorded_bytes - 1) > _MOST_ERROR:
        return _without(
            analysis,
            f"a replay under the recorded settings holds {format_bytes(replayed.reserved_peak_bytes)}, the recording "
            f"{format_bytes(recorded_bytes)}; was it written by another release than torch {torch_version}?",
        )
    choice = search_settings(trace, torch_version, capacity_bytes=capacity_bytes)
    is_better = (
        not choice.figures.is_out_of_memory and choice.figures.reserved_peak_bytes < replayed.reserved_peak_bytes
    )
    search = SettingsSearch(
        torch_version=torch_version,
        recorded_settings=format_settings(recorded),
        recorded_bytes=recorded_bytes,
        replayed_bytes=replayed.reserved_peak_bytes,
        best_settings=format_settings(choice.settings if is_better else recorded),
        best_bytes=choice.figures.reserved_peak_bytes if is_better else replayed.reserved_peak_bytes,
        default_bytes=choice.default_figures.reserved_peak_bytes,
        lower_bound_bytes=choice.lower_bound_bytes,
        num_tried=choice.num_tried,
    )
    notes = [f"settings were compared on a simulation of the allocator of torch {torch_version}"]
    if trace.held is not None:
        held_bytes = sum(held.num_bytes for held in trace.held.ranges)
        notes.append(
            f"{format_bytes(held_bytes)} were held before the recording began; every setting is simulated from them as "
            "they lay, though other settings would have placed them otherwise; to count them as well call "
            "torch.cuda.memory._record_memory_history before the model is built, with room for all events"
        )
        if not recording.start.blocks and not any(
            event.action in ("segment_alloc", "segment_map") for event in recording.events
        ):
            notes.append(
                "all memory was there before anything was in use: it was cached then, or skip_actions of "
                "_record_memory_history left out how it was taken, and these figures are worth nothing"
            )
    return replace(analysis, settings=search, notes=(*analysis.notes, *notes, *choice.notes))


def _without(analysis: DeviceAnalysis, reason: str) -> DeviceAnalysis:
    return replace(analysis, notes=(*analysis.notes, f"no other allocator settings were compared: {reason}"))


def _unusable(recording: DeviceHistory) -> str:
    """Says why the requests of a recording cannot be replayed; "" if they can."""
    if recording.num_unmatched:
        return _MISSING
    if any(event.pool != (0, 0) for event in recording.events):
        return "private pools (CUDA graphs, MemPool) are not replayed"
    if not any(event.action == "free_requested" for event in recording.events):
        return "the history is too short, nothing was freed in it; record a whole training step or more"
    return ""


def events_of_recording(recording: DeviceHistory, settings: AllocatorSettings) -> EventTrace | None:
    """Returns a recording as the requests of the program, numbered by their events; None if it contradicts itself."""
    emptied = {release.last for release in releases_of(recording) if not release.is_retry}
    events: list[Event] = []
    number_of: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for index, block in enumerate(recording.start.blocks):
        (waiting if block.is_pending else number_of)[block.address] = -1 - index
    for number, (event, following) in enumerate(pairwise((*recording.events, None))):
        assert event is not None, "only the last of the pairs ends with nothing"
        address = event.address
        if event.action == "alloc":
            number_of[address] = number
            events.append((ALLOC, number, max(event.num_bytes, 1), event.stream))
        elif event.action == "free_requested":
            freed = number_of.pop(address, None)
            if freed is None:
                return None
            is_done = following is not None and (following.action, following.address) == ("free_completed", address)
            if not is_done:
                waiting[address] = freed
            events.append((FREE if is_done else FREE_LATER, freed, 0, 0))
        elif event.action == "free_completed" and address in waiting:
            events.append((COMPLETE, waiting.pop(address), 0, 0))
        elif number in emptied:
            events.append((EMPTY_CACHE, 0, 0, 0))
    start = recording.start
    held = replace(start, granule_bytes=settings.large_segment_bytes) if start.ranges or start.blocks else None
    return EventTrace(events=tuple(events), steps=(0,), held=held)
