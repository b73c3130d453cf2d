"""Writes the tensors of a commit in the background, from where they lie, through a few blocks of staging memory.

Nothing is copied as a whole: while the next forward and backward run, parameters and optimizer state do not change, so
they are read then. Whoever changes them waits first (`CommitWriter.wait`).
"""

import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import round_up
from memwall.store.buckets import BucketBuffer, is_dense
from memwall.store.checksum import crc32
from memwall.store.generation import Stored
from memwall.store.journal import Journal
from memwall.store.scheduling import schedule_as_batch
from memwall.store.workers import LOOK_SECONDS, Transfer, stalled_disk

_TENSOR_ALIGNMENT_BYTES = 64
_NUM_STAGING_BLOCKS = 4
_STALL_SECONDS = 60.0


class CommitTimes(NamedTuple):
    """Holds what the commits of a process took, in the background of its steps for the most part."""

    num_commits: int = 0
    written_bytes: int = 0
    """Bytes of buckets, without what lay on disk already and what had not changed."""
    transfer_seconds: float = 0.0
    """Time to compare those with what was there, and to write them."""
    record_seconds: float = 0.0
    """Time for the table of contents, for the record, and to have each on disk before what follows it."""

    @property
    def mean_seconds(self) -> float:
        """Returns how long a commit took, on average."""
        return (self.transfer_seconds + self.record_seconds) / max(self.num_commits, 1)


class PackedBucket(NamedTuple):
    """Describes a bucket of tensors: their bytes, and where in the bucket each begins."""

    sources: tuple[Tensor, ...]
    """One-dimensional, of bytes."""
    offsets: tuple[int, ...]
    num_bytes: int
    """A multiple of 4096."""
    before: Stored | None
    """Place in the last commit, if it may have stayed the same since."""
    label: str


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor, as they lie; of another, in a copy without gaps."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole = tensor.detach()
    if not is_dense(whole):
        whole = whole.contiguous()
    size, begin = whole.element_size() * whole.numel(), whole.element_size() * whole.storage_offset()
    return flat.set_(whole.untyped_storage(), begin, (size,), (1,))


def packed(sizes: Sequence[int], bucket_bytes: int) -> list[list[tuple[int, int]]]:
    """Sorts tensors into buckets; returns per bucket (number of the tensor, offset) in order."""
    buckets: list[list[tuple[int, int]]] = []
    end = 0
    for number, size in enumerate(sizes):
        if not buckets or end + size > bucket_bytes:
            buckets.append([])
            end = 0
        buckets[-1].append((number, end))
        end += round_up(size, _TENSOR_ALIGNMENT_BYTES)
    return buckets


class CommitWriter:
    """Writes one commit at a time.

    Args:
        journal: begun.

    Attributes:
        times: of all commits so far.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal, self._block_bytes = journal, journal.pool.block_bytes
        self._staging: queue.SimpleQueue[BucketBuffer] = queue.SimpleQueue()
        for _ in range(_NUM_STAGING_BLOCKS):
            self._staging.put(BucketBuffer(self._block_bytes))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.times = CommitTimes()

    def begin(self, buckets: Sequence[PackedBucket], finish: Callable[[tuple[Stored, ...]], None]) -> None:
        """Begins to write; `finish` is called in the background, with where everything is, once it is written."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(buckets, finish), name="memwall-commit", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once what was begun is committed, or was given up.

        Raises:
            StoreError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, Exception):
            raise failure

    def _run(self, buckets: Sequence[PackedBucket], finish: Callable[[tuple[Stored, ...]], None]) -> None:
        schedule_as_batch()
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                stored, moved = [], []
                for bucket in buckets:
                    if bucket.before is not None and self._checksums_of(bucket) == bucket.before.slot.checksums:
                        stored.append(bucket.before)
                        continue
                    moved.append(self._write(bucket))
                    stored.append(moved[-1][0])
            for _, transfer in moved:
                transfer.wait()
            written = time.perf_counter()
            finish(tuple(stored))
            self.times = CommitTimes(
                self.times.num_commits + 1,
                self.times.written_bytes + sum(slot.num_bytes for slot, _ in moved),
                self.times.transfer_seconds + written - begin,
                self._journal.record_seconds,
            )
        except BaseException as error:  # raised again in the training thread
            self._failure = error if isinstance(error, Exception) else StoreError(f"a commit was ended by {error!r}")

    def _write(self, bucket: PackedBucket) -> tuple[Stored, Transfer]:
        journal = self._journal
        slot = journal.data.allocate(bucket.num_bytes)
        transfer = journal.pool.open_write(slot, bucket.label)
        for start in range(0, bucket.num_bytes, self._block_bytes):
            size = min(self._block_bytes, bucket.num_bytes - start)
            buffer = self._next_staging()
            try:
                self._fill(buffer, bucket, start, size)
            except BaseException:
                self._staging.put(buffer)
                raise

            def give_back(buffer: BucketBuffer = buffer) -> None:
                self._staging.put(buffer)

            journal.pool.add_write(transfer, start, buffer.view(size), keep=buffer.memory, after=give_back)
        transfer.seal()
        return Stored(slot, bucket.num_bytes), transfer

    def _next_staging(self) -> BucketBuffer:
        """Returns a free block: a worker gives each back, however its write ends."""
        for _ in range(round(_STALL_SECONDS / LOOK_SECONDS)):
            with suppress(queue.Empty):
                return self._staging.get(timeout=LOOK_SECONDS)
        raise stalled_disk(
            self._journal.directory,
            f"has finished nothing for {_STALL_SECONDS:.0f} s",
            "continue from the last committed step with --resume on a disk that works",
        )

    def first_changed(self, written: Iterable[tuple[PackedBucket, Stored]]) -> str | None:
        """Returns the label of the first bucket whose bytes are others now than were written; None if none are."""
        changed = (bucket.label for bucket, stored in written if self._checksums_of(bucket) != stored.slot.checksums)
        return next(changed, None)

    def _checksums_of(self, bucket: PackedBucket) -> dict[int, int]:
        """Returns what writing a bucket would record, of its bytes as they are now."""
        found: dict[int, int] = {}
        buffer = self._next_staging()
        try:
            for start in range(0, bucket.num_bytes, self._block_bytes):
                size = min(self._block_bytes, bucket.num_bytes - start)
                self._fill(buffer, bucket, start, size)
                found[start] = crc32(buffer.view(size))
        finally:
            self._staging.put(buffer)
        return found

    @staticmethod
    def _fill(buffer: BucketBuffer, bucket: PackedBucket, start: int, size: int) -> None:
        """Copies bytes [start, start + size) of a bucket; gaps between tensors are zeros."""
        block = buffer.tensor(0, torch.empty(size, dtype=torch.uint8, device="meta"))
        end, done = start + size, start
        for number in range(max(0, bisect_right(bucket.offsets, start) - 1), len(bucket.sources)):
            source, offset = bucket.sources[number], bucket.offsets[number]
            if offset >= end:
                break
            first, last = max(offset, start), min(offset + source.numel(), end)
            if first >= last:
                continue
            block[done - start : first - start].zero_()
            block[first - start : last - start].copy_(source[first - offset : last - offset])
            done = last
        block[done - start :].zero_()
