"""Whatever is wrong in a snapshot is named with its place, and repetitions are not unrolled."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from cuda_history import frame

from memwall.errors import TraceError
from memwall.trace.snapshot.read import load_snapshot

FRAMES = [frame("/home/me/part.py", 7, "forward")]


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
