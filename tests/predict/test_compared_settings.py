"""Which settings would have saved how much, from the history of a snapshot alone; and when that cannot be told."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cuda_history import MIB, History, simulated_snapshot, varying_requests

from memwall.predict.cuda_allocator.allocator_events import ALLOC, COMPLETE, EMPTY_CACHE, FREE, FREE_LATER, Event
from memwall.predict.snapshot.analysis import DeviceAnalysis, SettingsSearch, analyse_device
from memwall.predict.snapshot.compared_settings import with_settings
from memwall.trace.snapshot.read import load_snapshot

EXPANDABLE = "expandable_segments:True,large_segment_size_mb:20"

Searched = Callable[[dict[str, Any]], DeviceAnalysis]


@pytest.fixture
def searched(tmp_path: Path) -> Searched:
    def search(raw: dict[str, Any]) -> DeviceAnalysis:
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(raw))
        snapshot = load_snapshot(tmp_path / "s.pickle")
        return with_settings(analyse_device(snapshot, 0)[0], snapshot, "2.13.0")

    return search


def found(analysis: DeviceAnalysis) -> SettingsSearch:
    assert analysis.settings is not None, analysis.notes
    return analysis.settings


def refusal(analysis: DeviceAnalysis) -> str:
    assert analysis.settings is None
    return analysis.notes[-1].removeprefix("no other allocator settings were compared: ")


def alloc(block: int, mib: int) -> Event:
    return (ALLOC, block, mib * MIB, 0)


def free(block: int) -> Event:
    return (FREE, block, 0, 0)


AWAITED = (FREE_LATER, 1, 0, 0)


def test_the_best_settings_and_what_they_save(searched: Searched) -> None:
    raw, recorded = simulated_snapshot(varying_requests())
    search = found(searched(raw))
    assert search.recorded_bytes == search.replayed_bytes == recorded.reserved_peak_bytes
    assert search.recorded_settings == "expandable_segments:False,large_segment_size_mb:20"
    assert search.best_settings.startswith("expandable_segments:True,large_segment_size_mb:")
    _, best = simulated_snapshot(varying_requests(), search.best_settings)
    assert search.best_bytes == best.reserved_peak_bytes
    assert search.saved_bytes == recorded.reserved_peak_bytes - best.reserved_peak_bytes > 0.2 * search.recorded_bytes
    assert search.lower_bound_bytes <= search.best_bytes
    assert search.num_tried > 5


def test_the_recorded_settings_are_the_ones_replayed_and_stay_where_none_are_better(searched: Searched) -> None:
    raw, recorded = simulated_snapshot([alloc(1, 40), free(1), alloc(2, 40), free(2)], EXPANDABLE)
    search = found(searched(raw))
    assert search.recorded_bytes == search.replayed_bytes == search.best_bytes == recorded.reserved_peak_bytes
    assert (search.recorded_settings, search.best_settings, search.saved_bytes) == (EXPANDABLE, EXPANDABLE, 0)


@pytest.mark.parametrize(
    ("requests", "capacity_mib", "peak_mib"),
    [
        # Without the emptied cache 162 would be held.
        pytest.param(
            [alloc(9, 1), alloc(1, 60), free(1), (EMPTY_CACHE, 0, 0, 0), free(9), alloc(2, 100), free(2)],
            None,
            102,
            id="emptied-cache",
        ),
        # Where the next request takes a new segment, that the device had more before tells it from a retry.
        pytest.param(
            [alloc(1, 30), alloc(2, 70), free(2), (EMPTY_CACHE, 0, 0, 0), alloc(3, 60), alloc(4, 40), alloc(5, 40)]
            + [free(block) for block in (1, 3, 4, 5)],
            None,
            170,
            id="emptied-cache-then-new",
        ),
        # The first block is given back for the second.
        pytest.param([alloc(1, 60), free(1), alloc(2, 80), free(2)], 100, 80, id="retry"),
        # The first block waits for another stream while the second is asked for,
        pytest.param([alloc(1, 60), AWAITED, alloc(2, 60), free(2)], None, 120, id="other-stream"),
        # and is there for the third.
        pytest.param(
            [alloc(1, 60), AWAITED, alloc(2, 60), (COMPLETE, 1, 0, 0), alloc(3, 60), free(2), free(3)],
            None,
            120,
            id="other-stream-done",
        ),
    ],
)
def test_what_the_program_did_besides_is_replayed(
    requests: Sequence[Event], capacity_mib: int | None, peak_mib: int, searched: Searched
) -> None:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    raw, recorded = simulated_snapshot(requests, capacity_bytes=capacity_bytes)
    assert recorded.reserved_peak_bytes == peak_mib * MIB
    assert found(searched(raw)).replayed_bytes == peak_mib * MIB


def test_whose_allocator_was_simulated_is_noted(searched: Searched) -> None:
    raw, _ = simulated_snapshot(varying_requests())
    assert "settings were compared on a simulation of the allocator of torch 2.13.0" in searched(raw).notes


# -- begun late --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
@pytest.mark.parametrize("num_lost", [20, 75, 300])
def test_a_recording_that_began_late_starts_from_what_was_held(
    num_lost: int, settings: str, searched: Searched
) -> None:
    """GIVEN a history without its start WHEN it is replayed THEN it holds what was recorded."""
    raw, _ = simulated_snapshot(varying_requests(), settings)
    del raw["device_traces"][0][:num_lost]
    analysis = searched(raw)
    search = found(analysis)
    assert search.replayed_bytes == search.recorded_bytes
    assert search.lower_bound_bytes <= search.best_bytes <= search.replayed_bytes
    assert any(
        "were held before the recording began; every setting is simulated from them" in n for n in analysis.notes
    )
    assert any("max_split_size_mb was not tried" in note for note in analysis.notes)


def test_what_was_cached_when_it_began_is_not_asked_for_again(searched: Searched) -> None:
    """GIVEN 100 MiB that lay free at the start WHEN the program asks for 90 THEN nothing new is taken."""
    raw, _ = simulated_snapshot([alloc(1, 100), free(1), alloc(2, 90), free(2), alloc(3, 80), free(3)])
    events = raw["device_traces"][0]
    del events[: next(i for i, event in enumerate(events) if event["action"] == "free_completed") + 1]
    search = found(searched(raw))
    assert search.replayed_bytes == search.recorded_bytes == 100 * MIB
    assert search.lower_bound_bytes == 90 * MIB


def test_a_block_that_waited_for_a_stream_when_it_began_is_free_when_that_was_recorded(searched: Searched) -> None:
    requests = [alloc(1, 60), AWAITED, alloc(2, 60), (COMPLETE, 1, 0, 0), alloc(3, 60), free(2), free(3)]
    raw, _ = simulated_snapshot(requests)
    events = raw["device_traces"][0]
    del events[: next(i for i, event in enumerate(events) if event["action"] == "free_requested") + 1]
    search = found(searched(raw))
    assert search.replayed_bytes == search.recorded_bytes == 120 * MIB


# -- no claim ----------------------------------------------------------------------------------------------------------


def test_a_gap_in_the_history_tells_nothing(searched: Searched) -> None:
    raw, _ = simulated_snapshot(varying_requests())
    raw["device_traces"][0] = [event for event in raw["device_traces"][0] if event["action"] != "free_completed"]
    assert refusal(searched(raw)) == "parts of the history are missing"


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("alloc", "parts of the history are missing"),
        ("free_requested", "the history is too short, nothing was freed in it"),
        ("free_completed", "parts of the history are missing"),
        ("segment_free", "parts of the history are missing"),
    ],
)
def test_a_history_without_one_kind_of_event_tells_nothing(action: str, reason: str, searched: Searched) -> None:
    """As `_record_memory_history(skip_actions=...)` leaves it."""
    raw, _ = simulated_snapshot(varying_requests())
    raw["device_traces"][0] = [event for event in raw["device_traces"][0] if event["action"] != action]
    assert refusal(searched(raw)).startswith(reason)


def test_a_history_without_taking_memory_may_be_one_that_began_with_it(searched: Searched) -> None:
    """Which of the two cannot be told: the note says so."""
    raw, _ = simulated_snapshot(varying_requests())
    assert not any("skip_actions" in note for note in searched(raw).notes)
    raw["device_traces"][0] = [event for event in raw["device_traces"][0] if event["action"] != "segment_alloc"]
    assert any("skip_actions of _record_memory_history left out" in note for note in searched(raw).notes)


def test_a_block_freed_twice_tells_nothing(searched: Searched) -> None:
    raw, _ = simulated_snapshot([alloc(1, 40), free(1)])
    events = raw["device_traces"][0]
    events.insert(2, next(event for event in events if event["action"] == "free_requested"))
    assert refusal(searched(raw)) == "parts of the history are missing"


def test_a_history_without_a_free_is_too_short(searched: Searched) -> None:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB)
    assert refusal(searched(history.snapshot())) == (
        "the history is too short, nothing was freed in it; record a whole training step or more"
    )


def test_private_pools_are_not_replayed(searched: Searched) -> None:
    raw, _ = simulated_snapshot(varying_requests())
    raw["device_traces"][0][5]["pool_id"] = (0, 3)
    assert refusal(searched(raw)) == "private pools (CUDA graphs, MemPool) are not replayed"


def test_settings_that_this_torch_does_not_know_are_named(searched: Searched) -> None:
    raw, _ = simulated_snapshot(varying_requests())
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    assert refusal(searched(raw)) == (
        "the settings of the recording cannot be simulated: backend:cudaMallocAsync does not use PyTorch's own "
        "allocator, so there is nothing to simulate"
    )


def test_a_replay_that_does_not_reproduce_the_recording_claims_nothing(searched: Searched) -> None:
    history = History()
    history.segment(0, 40 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB)
    history.free(0)
    assert refusal(searched(history.snapshot())) == (
        "a replay under the recorded settings holds 20.0 MiB, the recording 40.0 MiB; was it written by another "
        "release than torch 2.13.0?"
    )
