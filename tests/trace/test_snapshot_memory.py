"""Large snapshots are read as a stream: what is in memory is what is kept of them, however long their stacks are."""

import gc
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_history import BASE, MIB, History, frame

from memwall.errors import TraceError
from memwall.trace.snapshot import read as snapshot
from memwall.trace.snapshot.read import load_snapshot

FRAMES = [frame(f"/home/me/part{k % 50}.py", k, "forward") for k in range(600)]


def events(num_events: int, num_frames: int) -> Iterator[dict[str, Any]]:
    """As torch writes them: each allocation has a list of its own, of frames that all of them share."""
    for k in range(num_events // 2):
        first = k % 50
        common = {"addr": BASE + k % 499 * MIB, "size": 1000 + k % 97 * 512, "stream": 0}
        for action in ("alloc", "free_completed"):
            stack = FRAMES[first : first + num_frames]
            yield {"action": action, **common, "time_us": 10**15 + k, "pool_id": (0, 0), "frames": stack}


def write(file: Path, num_events: int, num_frames: int) -> int:
    value = {"segments": [], "device_traces": [list(events(num_events, num_frames))], "allocator_settings": {}}
    file.write_bytes(pickle.dumps(value))
    return file.stat().st_size


def peak_and_kept_bytes(file: Path) -> tuple[int, int]:
    gc.collect()
    tracemalloc.start()
    try:
        loaded = load_snapshot(file)
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loaded.traces[0]
    return peak_bytes, kept_bytes


@pytest.mark.slow
def test_memory_grows_with_the_records_kept_and_not_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN files of two lengths and two depths of stacks THEN an event takes what its record does, and little more."""
    monkeypatch.setattr("memwall.trace.snapshot.restricted_pickle._WINDOW_BYTES", 1 << 16)
    file = tmp_path / "s.pickle"
    per_event = {}
    for num_frames in (4, 160):
        sizes = [(write(file, num_events, num_frames), *peak_and_kept_bytes(file)) for num_events in (300, 800)]
        per_event[num_frames] = [(large - small) / 500 for small, large in zip(*sizes, strict=True)]
    file_bytes, peak_bytes, kept_bytes = per_event[160]
    assert file_bytes > 8 * per_event[4][0]
    assert kept_bytes < 1.05 * per_event[4][2] < 250
    assert peak_bytes < 1.5 * kept_bytes


def test_the_stream_gives_what_the_whole_file_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN blocks and events that share stacks, unknown actions and missing ones THEN nothing differs."""
    history = History()
    history.segment(0, 20 * MIB)
    shared = [FRAMES[3], FRAMES[4]]
    history.alloc(0, 8 * MIB, 8 * MIB, shared)
    history.alloc(8 * MIB, 4 * MIB, 4 * MIB, [FRAMES[3], dict(FRAMES[4])], "activation")
    history.free(0)
    value = history.snapshot()
    value["device_traces"][0] += [
        {"action": "from_the_future", "size": 1, "frames": shared},
        {"action": "snapshot", "size": 7},
        {"action": "alloc", "addr": BASE, "size": 3, "frames": (FRAMES[5],)},
        {"action": "alloc", "addr": BASE, "size": 3, "frames": None},
    ]
    file = tmp_path / "s.pickle"
    for protocol in (2, 4, 5):
        file.write_bytes(pickle.dumps(value, protocol))
        streamed = load_snapshot(file)
        with monkeypatch.context() as patch:
            patch.setattr(snapshot._Importer, "compact", lambda self, fields: None)
            assert streamed == load_snapshot(file)
        assert streamed.unknown_actions == ("from_the_future",)


@pytest.mark.parametrize(
    ("event", "place"),
    [
        ({"action": "alloc", "addr": -1, "size": 1, "frames": [FRAMES[0]]}, "$.device_traces[0][1].addr"),
        ({"action": "alloc", "addr": 1, "size": 1, "frames": [{"name": 1, "filename": "f"}]}, "[1].frames[0].name"),
        ({"action": "alloc", "addr": 1, "size": 1, "frames": [7]}, "$.device_traces[0][1].frames[0] expected a dict"),
    ],
)
def test_what_is_wrong_is_still_named_with_its_place(event: dict[str, Any], place: str, tmp_path: Path) -> None:
    first = {"action": "alloc", "addr": 1, "size": 1, "frames": [FRAMES[0]]}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[first, event]]}))
    with pytest.raises(TraceError) as raised:
        load_snapshot(tmp_path / "s.pickle")
    assert place in str(raised.value)


def test_one_event_a_million_times_is_refused(tmp_path: Path) -> None:
    """GIVEN lists of lists that hold one event again and again, which a small file can, THEN nothing is unrolled."""
    event = {"action": "alloc", "addr": 1, "size": 1}
    many = [[event] * 1000] * 1000
    (tmp_path / "s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": many}))
    with pytest.raises(TraceError, match="the same ones used again and again"):
        load_snapshot(tmp_path / "s.pickle")
