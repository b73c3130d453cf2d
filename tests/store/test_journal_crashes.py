"""Whenever the power fails, a checkpoint directory holds the last committed generation, or the one under way: whole."""

import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_disk import SimulatedDisk

from memwall.errors import StoreError
from memwall.store.data_file import DataFile
from memwall.store.generation import Stored
from memwall.store.journal import Journal
from memwall.store.scratch import Slot

PAGE = 4096
CHANGES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), min_size=1, max_size=4)
"""Per generation, which of three buckets it writes anew."""
SIZES = st.tuples(*[st.integers(1, 3)] * 3)


def contents(bucket: int, generation: int, num_pages: int) -> bytes:
    """What a generation writes into a bucket: every sector names both."""
    return (f"bucket {bucket} of generation {generation:4d};".ljust(512, ".")).encode() * (8 * num_pages)


def write(journal: Journal, bucket: int, generation: int, num_pages: int) -> Stored:
    slot = journal.data.allocate(num_pages * PAGE)
    memory = mmap.mmap(-1, slot.num_bytes)
    memory.write(contents(bucket, generation, num_pages))
    journal.pool.write(slot, memoryview(memory), label=f"bucket {bucket}").wait()
    return Stored(slot, slot.num_bytes)


class Run:
    """Generations written to a simulated disk, and where in its log each of them began and was committed."""

    def __init__(self, directory: Path, disk: SimulatedDisk, sizes: tuple[int, ...]) -> None:
        self.directory, self.disk, self.sizes = directory, disk, sizes
        self.expected: dict[int, list[int]] = {}
        self.begun: list[tuple[int, int]] = []
        self.committed: list[tuple[int, int]] = []

    def go_on(self, changes: list[list[int]]) -> None:
        with Journal(self.directory, backend=self.disk, num_workers=1, block_bytes=PAGE) as journal:
            step = 0 if journal.last is None else journal.last.step
            stored = [] if journal.last is None else list(journal.last.buckets)
            if journal.last is None:
                journal.begin(b"a model of these")
            for number, changed in enumerate(changes, start=step + 1):
                self.begun.append((len(self.disk.log), number))
                which = changed if stored else [0, 1, 2]
                new = {bucket: write(journal, bucket, number, self.sizes[bucket]) for bucket in which}
                stored = [new.get(bucket) or stored[bucket] for bucket in range(3)]
                journal.commit(number, stored, f"content {number}".encode())
                self.committed.append((len(self.disk.log), number))

    def bounds_at(self, position: int) -> tuple[int, int]:
        """The oldest and the newest generation that may be found after a crash there; 0 is none at all."""
        oldest = max((number for at, number in self.committed if at <= position), default=0)
        return oldest, max((number for at, number in self.begun if at <= position), default=0)

    def found_on(self, disk: SimulatedDisk) -> int:
        """The generation recovered from a disk, after a look at every byte of it; 0 if there is none."""
        with Journal(self.directory, backend=disk, num_workers=1, block_bytes=PAGE) as journal:
            if journal.last is None:
                return 0
            generation = journal.last
            assert generation.content == f"content {generation.step}".encode()
            for bucket, stored in enumerate(generation.buckets):
                memory = mmap.mmap(-1, stored.num_bytes)
                journal.pool.read(stored.slot, memoryview(memory), label="bucket").wait()
                found = memory[:]
                assert found == contents(bucket, self.expected[generation.step][bucket], self.sizes[bucket])
            return generation.step


def generations(changes: list[list[int]]) -> dict[int, list[int]]:
    """Per step, the generation in which each bucket was written last."""
    last, found = [1, 1, 1], {}
    for step, changed in enumerate(changes, start=1):
        last = [step if bucket in changed or step == 1 else last[bucket] for bucket in range(3)]
        found[step] = last
    return found


def is_lost_or_mixed(run: Run, disk: SimulatedDisk, position: int) -> bool:
    oldest, newest = run.bounds_at(position)
    try:
        found = run.found_on(disk)
    except (StoreError, AssertionError):
        return True
    return not oldest <= found <= newest


@pytest.mark.slow
@settings(max_examples=120)
@given(SIZES, CHANGES, st.floats(0, 1), st.integers(0, 2**32))
def test_after_a_loss_of_power_the_last_or_the_next_generation_is_there_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, ...], changes: list[list[int]], when: float, seed: int
) -> None:
    run = Run(tmp_path_factory.getbasetemp(), SimulatedDisk(), sizes)
    run.expected = generations(changes)
    run.go_on(changes)
    position = round(when * len(run.disk.log))
    oldest, newest = run.bounds_at(position)
    assert oldest <= run.found_on(run.disk.without_power_at(position, seed)) <= newest


@pytest.mark.slow
@settings(max_examples=80)
@given(SIZES, CHANGES, CHANGES, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_a_run_killed_and_resumed_survives_a_loss_of_power_after_that(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, ...],
    first: list[list[int]],
    second: list[list[int]],
    killed: float,
    when: float,
    seed: int,
) -> None:
    before = Run(tmp_path_factory.getbasetemp(), SimulatedDisk(), sizes)
    before.expected = generations(first)
    before.go_on(first)
    position = round(killed * len(before.disk.log))
    resumed = Run(before.directory, before.disk.killed_at(position), sizes)
    resumed.expected = before.expected
    oldest = resumed.found_on(resumed.disk)  # opened, it is safe from then on
    resumed.expected = generations([*first[:oldest], *second])
    begin = len(resumed.disk.log)
    resumed.committed, resumed.begun = [(begin, oldest)], [(begin, oldest)]
    resumed.go_on(second)
    position = begin + round(when * (len(resumed.disk.log) - begin))
    oldest, newest = resumed.bounds_at(position)
    assert oldest <= resumed.found_on(resumed.disk.without_power_at(position, seed)) <= newest


CHANGED = [[0], [1, 2], [0, 1], [2], [0, 1, 2]]


def outcomes(run: Run) -> Iterator[bool]:
    """Of a loss of power at every instant, in a few ways each, whether something was lost or mixed."""
    for position in range(len(run.disk.log) + 1):
        for seed in range(6):
            yield is_lost_or_mixed(run, run.disk.without_power_at(position, seed), position)


def test_no_instant_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, SimulatedDisk(), (2, 1, 3))
    run.expected = generations(CHANGED)
    run.go_on(CHANGED)
    assert len(run.disk.log) > 40
    assert not any(outcomes(run))


@pytest.mark.parametrize("name", ["memwall.data", "memwall.commit"])
def test_without_either_sync_the_simulation_finds_a_loss(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, SimulatedDisk(ignores_sync_of=name), (2, 1, 3))
    run.expected = generations(CHANGED)
    run.go_on(CHANGED)
    assert any(outcomes(run))


def test_with_committed_extents_written_over_the_simulation_finds_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, SimulatedDisk(), (2, 1, 3))
    run.expected = generations(CHANGED)
    offsets = itertools.cycle(range(0, 16 * PAGE, 4 * PAGE))  # an extent is used again two generations later
    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "allocate", lambda _, num_bytes: Slot(next(offsets), num_bytes))
        patch.setattr(DataFile, "free", lambda _, slot: None)
        patch.setattr(DataFile, "publish", lambda _, slots: None)
        run.go_on(CHANGED)
    assert any(outcomes(run))
