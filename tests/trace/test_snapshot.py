"""Snapshots from torch are read whole; a wrong value in one is named with its place."""

import io
import pickle
import pickletools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_history import BASE, MIB, History, frame

from memwall.errors import TraceError
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.records import Event, Frame, Snapshot, SnapshotBlock, SnapshotSegment

TRAIN = frame("/home/me/train.py", 42, "step")
LINEAR = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")


@pytest.fixture
def history() -> History:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 3 * MIB, 3 * MIB, [LINEAR, TRAIN])
    history.alloc(3 * MIB, 5 * MIB - 100, 5 * MIB, [LINEAR, TRAIN])
    history.free(0)
    history.oom(64 * MIB, 7 * MIB)
    return history


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def dumped(snapshot: object, file: Path, protocol: int = pickle.DEFAULT_PROTOCOL) -> Path:
    file.write_bytes(pickle.dumps(snapshot, protocol))
    return file


# -- what torch writes -------------------------------------------------------------------------------------------------


def test_everything_of_a_snapshot_arrives(history: History, file: Path) -> None:
    snapshot = load_snapshot(dumped(history.snapshot(), file))
    assert snapshot == Snapshot(
        segments=(
            SnapshotSegment(
                device=0,
                address=BASE,
                num_bytes=20 * MIB,
                stream=0,
                kind="large",
                pool=(0, 0),
                is_expandable=False,
                blocks=(
                    SnapshotBlock(BASE, 3 * MIB, 0, "inactive", 0),
                    SnapshotBlock(BASE + 3 * MIB, 5 * MIB, 5 * MIB - 100, "active_allocated", 1),
                    SnapshotBlock(BASE + 8 * MIB, 12 * MIB, 0, "inactive", 0),
                ),
            ),
        ),
        traces=(snapshot.traces[0],),
        stacks=((), (Frame(LINEAR["filename"], 134, "forward"), Frame("/home/me/train.py", 42, "step"))),
        settings={
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": "-1",
            "garbage_collection_threshold": "0.0",
            "expandable_segments": "False",
            "pinned_num_register_threads": "1",
            "release_lock_on_cudamalloc": "False",
            "pinned_use_cuda_host_register": "False",
            "roundup_power2_divisions": "['1':0,'2':0]",
        },
        unknown_actions=(),
    )
    actions = [event.action for event in snapshot.traces[0]]
    assert actions == ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed", "oom"]
    assert snapshot.traces[0][1] == Event("alloc", BASE, 3 * MIB, 0, 1, (0, 0), "", 0)
    assert snapshot.traces[0][5] == Event("oom", 0, 64 * MIB, 0, 0, (0, 0), "", 7 * MIB)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_can_write_gives_the_same(history: History, file: Path, protocol: int) -> None:
    written = load_snapshot(dumped(history.snapshot(), file))
    assert load_snapshot(dumped(history.snapshot(), file, protocol)) == written
    optimised = pickletools.optimize(pickle.dumps(history.snapshot(), protocol))
    file.write_bytes(optimised)
    assert load_snapshot(file) == written


def test_the_pure_python_pickler_gives_the_same(history: History, file: Path) -> None:
    written = load_snapshot(dumped(history.snapshot(), file))
    buffer = io.BytesIO()
    pickle._Pickler(buffer, 4).dump(history.snapshot())  # type: ignore[attr-defined]
    file.write_bytes(buffer.getvalue())
    assert load_snapshot(file) == written


def test_an_older_snapshot_without_the_newer_keys(history: History, file: Path) -> None:
    old = history.snapshot()
    for event in old["device_traces"][0]:
        for key in ("time_us", "compile_context", "user_metadata", "pool_id", "frames"):
            del event[key]
    for segment in old["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            del block["frames"], block["address"], block["requested_size"]
    del old["allocator_settings"], old["external_annotations"]
    snapshot = load_snapshot(dumped(old, file))
    assert [block.address for block in snapshot.segments[0].blocks] == [BASE, BASE + 3 * MIB, BASE + 8 * MIB]
    assert snapshot.stacks == ((),)


def test_the_list_of_memory_snapshot_alone(history: History, file: Path) -> None:
    snapshot = load_snapshot(dumped(history.snapshot()["segments"], file))
    assert len(snapshot.segments) == 1
    assert snapshot.traces == ()


def test_categories(history: History, file: Path) -> None:
    raw = history.snapshot()
    raw["device_traces"][0][1]["category"] = "activation"
    snapshot = load_snapshot(dumped(raw, file))
    assert snapshot.traces[0][1].category == "activation"


def test_a_snapshot_that_torch_made_of_a_profile(file: Path) -> None:
    import torch
    from torch.cuda import _memory_viz

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, record_shapes=True, with_stack=True) as profile:
        for _ in range(2):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    raw = _memory_viz._profile_to_snapshot(profile)
    snapshot = load_snapshot(dumped(raw, file))
    assert [len(events) for events in snapshot.traces] == [len(events) for events in raw["device_traces"]]
    categories = {event.category for events in snapshot.traces for event in events}
    assert categories >= {"activation", "gradient", "optimizer_state"}
    used = [block for segment in snapshot.segments for block in segment.blocks if block.state == "active_allocated"]
    assert sum(block.requested_bytes for block in used) >= 4 * (64 * 128 + 128 + 128 * 10 + 10)


def test_an_action_of_a_later_torch_is_left_out_and_named(history: History, file: Path) -> None:
    raw = history.snapshot()
    raw["device_traces"][0].insert(2, {"action": "user_defined", "addr": 1, "size": 1, "stream": 0})
    snapshot = load_snapshot(dumped(raw, file))
    assert snapshot.unknown_actions == ("user_defined",)
    assert len(snapshot.traces[0]) == 6


def test_text_cannot_reach_into_the_terminal(history: History, file: Path) -> None:
    raw = history.snapshot()
    raw["device_traces"][0][1]["frames"] = [frame("/home/\x1b]0;owned\x07.py", 1, "\x1b[2J")]
    snapshot = load_snapshot(dumped(raw, file))
    found = [frame for stack in snapshot.stacks for frame in stack if frame.line == 1]
    assert found == [Frame("/home/\\x1b]0;owned\\x07.py", 1, "\\x1b[2J")]


def test_forty_thousand_events_take_seconds(file: Path) -> None:
    history = History()
    history.segment(0, 2000 * MIB)
    stacks = [[frame("/home/me/train.py", line, "step"), TRAIN, LINEAR] * 8 for line in range(50)]
    raw = history.snapshot()
    for index in range(20_000):
        fields = {"addr": BASE + 512 * index, "size": 512, "stream": 0, "time_us": index, "frames": stacks[index % 50]}
        raw["device_traces"][0] += [{"action": "alloc", **fields}, {"action": "free_completed", **fields}]
    dumped(raw, file)
    begin = time.process_time()
    snapshot = load_snapshot(file)
    assert time.process_time() - begin < 6
    assert len(snapshot.traces[0]) == 40_001
    assert len(snapshot.stacks) == 51


# -- files that are not what they should be ----------------------------------------------------------------------------


def refused(file: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as raised:
        load_snapshot(file, **options)
    message = str(raised.value)
    assert message.startswith((str(file), f"cannot read the snapshot {file}"))
    return message.removeprefix(f"{file} ")


def test_a_file_that_is_missing(file: Path) -> None:
    assert refused(file) == f"cannot read the snapshot {file}: No such file or directory"


def test_every_truncation_is_refused(history: History, file: Path) -> None:
    whole = pickle.dumps(history.snapshot())
    for length in range(0, len(whole), 23):
        file.write_bytes(whole[:length])
        assert "is cut short or damaged" in refused(file)


def test_bytes_that_were_turned_over_never_do_more_than_fail(history: History, file: Path) -> None:
    whole = pickle.dumps(history.snapshot())
    for position in range(2, len(whole), 3):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ (position % 255 + 1)]) + whole[position + 1 :])
        try:
            load_snapshot(file)
        except TraceError as error:
            assert str(file) in str(error)  # noqa: PT017


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}", b"memwall.trace/2\n", b"\x80\x04", b"\x80\x09N."])
def test_other_files_are_not_taken_for_snapshots(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert refused(file)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def apply(raw: dict[str, Any]) -> dict[str, Any]:
        change(raw)
        return raw

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: 7, "at $ expected a dict, found 7"),
        (lambda raw: {"traces": []}, "at $ expected a dict with 'segments' and 'device_traces', found the keys a list"),
        (changed(lambda raw: raw.update(segments={})), "at $.segments expected a list, found a dict of 0"),
        (
            changed(lambda raw: raw["segments"][0].pop("total_size")),
            "at $.segments[0].total_size expected an integer, found nothing",
        ),
        (
            changed(lambda raw: raw["segments"][0]["blocks"].pop()),
            "at $.segments[0].blocks expected blocks of 20971520 bytes together, found 8388608 bytes",
        ),
        (
            changed(lambda raw: raw["segments"][0]["blocks"][1].update(state="lost")),
            "at $.segments[0].blocks[1].state expected active_allocated, active_pending_free or inactive, found 'lost'",
        ),
        (
            changed(lambda raw: raw["segments"][0]["blocks"][1].update(address=5)),
            f"at $.segments[0].blocks[1].address expected {BASE + 3 * MIB}, where the block before it ends, found 5",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].update(size="5")),
            "at $.device_traces[0][2].size expected an integer, found '5'",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].update(size=-5)),
            "at $.device_traces[0][2].size expected an integer from 0 to 1152921504606846975, found -5",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].update(size=True)),
            "at $.device_traces[0][2].size expected an integer, found True",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].pop("action")),
            "at $.device_traces[0][2].action expected the name of an action, found None",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].update(frames=[{"filename": 3}])),
            "at $.device_traces[0][2].frames[0].filename expected a text, found 3",
        ),
        (
            changed(lambda raw: raw["device_traces"][0][2].update(pool_id=(0,))),
            "at $.device_traces[0][2].pool_id expected two integers, found a tuple of 1",
        ),
        (changed(lambda raw: raw.update(device_traces=[7])), "at $.device_traces[0] expected a list, found 7"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    history: History, file: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    dumped(change(history.snapshot()), file)
    assert refused(file).startswith(f"is not a valid memory snapshot: {message}")
