"""Checkpoint directories with a few steps in them, and what is found there again."""

import mmap
from pathlib import Path

import pytest

from memwall.errors import StoreError
from memwall.store.backend import SystemBackend
from memwall.store.generation import Stored
from memwall.store.journal import Journal

__all__ = ["PAGE", "commit_steps", "found_step", "get", "put", "refusal"]

PAGE = 4096


def put(journal: Journal, fill: int, num_bytes: int = 3 * PAGE) -> Stored:
    slot = journal.data.allocate(num_bytes)
    memory = mmap.mmap(-1, slot.num_bytes)
    memory.write(bytes([fill]) * num_bytes)
    journal.pool.write(slot, memoryview(memory), label=f"bucket of {fill}").wait()
    return Stored(slot, num_bytes)


def get(journal: Journal, stored: Stored) -> set[int]:
    memory = mmap.mmap(-1, stored.num_bytes)
    journal.pool.read(stored.slot, memoryview(memory), label="a bucket").wait()
    return set(memory[:])


def commit_steps(directory: Path, *steps: int, backend: SystemBackend | None = None) -> None:
    """Two buckets per step: one that holds the step's number, one that stays."""
    with Journal(directory, backend=backend, block_bytes=PAGE) as journal:
        if journal.last is None:
            journal.begin(b"0123456789abcdef")
        kept = put(journal, 200) if journal.last is None else journal.last.buckets[1]
        for step in steps:
            journal.commit(step, [put(journal, step), kept], f"step {step}".encode())


def found_step(directory: Path) -> int:
    """The step that is recovered, with its data looked at."""
    with Journal(directory) as journal:
        assert journal.last is not None
        step = journal.last.step
        assert journal.last.content == f"step {step}".encode()
        assert [get(journal, stored) for stored in journal.last.buckets] == [{step}, {200}]
        return step


def refusal(directory: Path) -> str:
    with pytest.raises(StoreError) as caught:
        Journal(directory)
    return str(caught.value)
