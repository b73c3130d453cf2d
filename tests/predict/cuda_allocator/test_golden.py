"""Recorded histories of whole programs, simulated again: L1 under their own settings, L2 under those of siblings.

`make gpu-truth` records on a GPU, `python -m benchmarks.allocator_oracle --torch VERSION --golden` without one: torch's
own allocator over a stub of the CUDA runtime, which says nothing about a device and is marked as simulated.
"""

from itertools import permutations
from pathlib import Path

import pytest
from allocator_programs import RUNS, WHAT_IFS
from allocator_record import (
    AllocatorRecord,
    first_difference,
    load_records,
    peak_differences,
    record_of,
    save_record,
)
from msgspec.structs import replace

from memwall.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDS = load_records(GOLDEN)
SIBLINGS = [
    (one, other)
    for one, other in permutations(RECORDS, 2)
    if Path(one).parent == Path(other).parent and RECORDS[one].program == RECORDS[other].program
]
STUB = "stub-torch-2.13.0"


@pytest.mark.parametrize("name", RECORDS)
def test_l1_every_event_and_all_statistics_are_the_recorded_ones(name: str) -> None:
    record = RECORDS[name]
    assert sum(event[0] == "alloc" for event in record.events) > 10
    assert first_difference(record) is None


@pytest.mark.parametrize(("name", "other"), SIBLINGS)
def test_l2_peaks_under_other_settings_are_those_of_the_run_that_had_them(name: str, other: str) -> None:
    assert peak_differences(RECORDS[name], RECORDS[other]) == []


def test_a_record_says_where_it_is_from() -> None:
    for name, record in RECORDS.items():
        is_stub = name.startswith("stub-torch-")
        assert record.tag == ("simulated" if is_stub else "gpu-measured")
        assert record.device.startswith("stub of the CUDA runtime") == is_stub
        assert Path(name).name == record.name


def test_there_are_records_of_a_gpu() -> None:
    folders = {Path(name).parent for name, record in RECORDS.items() if record.tag == "gpu-measured"}
    if not folders:
        pytest.skip("no history of a GPU is recorded yet: make gpu-truth on a machine that has one")
    for folder in folders:
        # A device may be lent for minutes: these two come first.
        found = {record.program for name, record in RECORDS.items() if Path(name).parent == folder}
        assert set(list(dict(RUNS))[:2]) <= found <= set(dict(RUNS))


def test_every_run_is_there_over_the_stub() -> None:
    found = {(record.program, record.settings) for name, record in RECORDS.items() if name.startswith(STUB)}
    assert found == set(RUNS)
    assert len(dict(RUNS)) == 4
    assert len(WHAT_IFS) == 4
    assert len(SIBLINGS) >= 5 * 4


# -- what the checks see -----------------------------------------------------------------------------------------------


def the(name: str) -> AllocatorRecord:
    return RECORDS[f"{STUB}/{name}"]


def test_the_rule_for_ties_of_another_release_gives_other_addresses() -> None:
    record = the("variable-transformer")
    assert "alloc" in (first_difference(replace(record, torch="2.12.0")) or "")


def test_a_byte_more_in_a_statistic_is_a_difference() -> None:
    record = the("static-mlp")
    name = "inactive_split_bytes.large_pool.peak"
    statistics = record.statistics | {name: record.statistics[name] + 1}
    assert name in (first_difference(replace(record, statistics=statistics)) or "")


def test_a_cache_that_was_emptied_without_a_mark_is_a_difference() -> None:
    record = the("cross-stream")
    marks = [(position, text) for position, text in record.marks if text != "empty_cache"]
    assert first_difference(replace(record, marks=marks)) is not None


def test_a_limit_without_a_mark_is_a_difference() -> None:
    assert first_difference(replace(the("out-of-memory"), marks=[])) is not None


def test_a_wait_that_ends_because_memory_is_out_is_no_early_free() -> None:
    """GIVEN a block that comes back while a retry waits THEN the request fails all the same, for it looks no more."""
    record = the("out-of-memory")
    failed = [number for number, event in enumerate(record.events) if event[0] == "oom"]
    assert record.events[failed[0] - 1][0] == "free_completed"
    assert record.events[failed[0] - 1][2] == record.events[failed[0]][2]
    assert first_difference(record) is None


def test_recordings_hold_what_they_are_made_for() -> None:
    out_of_memory = the("out-of-memory").statistics
    assert (out_of_memory["num_ooms"], out_of_memory["num_alloc_retries"]) == (2, 3)
    late = the("cross-stream").events
    waits = [number for number, event in enumerate(late) if event[0] == "free_completed"]
    assert any(late[number - 1][:2] != ("free_requested", late[number][1]) for number in waits)
    expandable = the("variable-transformer-expandable-segments-true").events
    assert {"segment_map", "segment_unmap"} <= {event[0] for event in expandable}


def test_peaks_of_a_run_that_asked_for_something_else_differ() -> None:
    record, other = the("variable-transformer"), the("variable-transformer-max-split-size-mb-32")
    assert peak_differences(replace(record, events=record.events[:4000], marks=record.marks[:2]), other) != []
    with pytest.raises(UsageError, match="is no other run of variable-transformer"):
        peak_differences(record, the("static-mlp"))
    with pytest.raises(UsageError, match="requests of out-of-memory failed"):
        peak_differences(the("out-of-memory"), the("out-of-memory"))


def test_a_history_with_marks_missing_is_refused() -> None:
    entry = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}
    with pytest.raises(ValueError, match="has 1 marks, the program made 2"):
        record_of({"device_traces": [[entry]]}, ["phase a", "phase b"])


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = the("out-of-memory")
    save_record(record, tmp_path / "device")
    assert load_records(tmp_path) == {"device/out-of-memory": record}
