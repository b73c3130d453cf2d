"""Reads one generation of a checkpoint, and verifies every byte of it before a run may continue from it."""

import mmap
from typing import NamedTuple

from memwall.errors import OffloadIOError
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.checksum import crc32
from memwall.store.commit_format import Extent, Record, decode_meta, digest_of
from memwall.store.data_file import DataFile
from memwall.store.scratch import Slot
from memwall.units import format_bytes

_CONTENTS = "the table of contents"


class Stored(NamedTuple):
    """Names a bucket on disk: what was written, with its checksums, in blocks of the pool's size."""

    slot: Slot
    num_bytes: int
    """Counts what was written, a multiple of 4096."""


class Generation(NamedTuple):
    """Holds a committed step as it was found, every byte of it verified."""

    number: int
    step: int
    buckets: tuple[Stored, ...]
    content: bytes
    meta: Slot

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Lists all that must not be written to while this is the last one."""
        return (*(stored.slot for stored in self.buckets), self.meta)


def verified(data: DataFile, record: Record, *, block_bytes: int) -> Generation:
    """Returns what a commit record points to.

    Args:
        block_bytes: what each checksum covers.

    Raises:
        OffloadIOError: it is not there as it was written.
    """
    padded_bytes = round_up(record.meta_bytes)
    if record.meta_bytes == 0 or record.meta_offset % ALIGNMENT_BYTES:
        raise _damaged(data, _CONTENTS, record.meta_offset, padded_bytes)
    meta_slot = Slot(record.meta_offset, padded_bytes)
    _check_inside(data, meta_slot.offset, padded_bytes, _CONTENTS)
    pages = blank_pages(padded_bytes)
    data.read(meta_slot, 0, pages, _CONTENTS)
    contents = bytes(pages[: record.meta_bytes])
    if digest_of(contents) != record.meta_digest:
        raise _damaged(data, _CONTENTS, record.meta_offset, padded_bytes)
    meta = decode_meta(contents)
    for number, extent in enumerate(meta.buckets):
        if not extent.is_sound(block_bytes):
            raise _damaged(data, f"the place of bucket {number}", record.meta_offset, padded_bytes)
    buckets = tuple(_stored(extent, block_bytes) for extent in meta.buckets)
    pages = blank_pages(block_bytes)
    for number, stored in enumerate(buckets):
        _check_inside(data, stored.slot.offset, stored.num_bytes, f"bucket {number}")
        for offset, checksum in stored.slot.checksums.items():
            block = pages[: min(block_bytes, stored.num_bytes - offset)]
            data.read(stored.slot, offset, block, f"bucket {number}")
            if crc32(block) != checksum:
                raise _damaged(data, f"bucket {number}", stored.slot.offset + offset, len(block))
    return Generation(meta.generation, meta.step, buckets, meta.content, meta_slot)


def blank_pages(num_bytes: int) -> memoryview:
    """Returns page-aligned zeros that live as long as their views: those in an error's traceback too."""
    return memoryview(mmap.mmap(-1, num_bytes))


def _stored(extent: Extent, block_bytes: int) -> Stored:
    offsets = range(0, extent.num_bytes, block_bytes)
    checksums = dict(zip(offsets, extent.checksums, strict=True))
    return Stored(Slot(extent.offset, extent.slot_bytes, checksums), extent.num_bytes)


def _check_inside(data: DataFile, offset: int, num_bytes: int, label: str) -> None:
    length_bytes = data.length_bytes
    if offset + num_bytes > length_bytes:
        raise OffloadIOError(
            f"{data.path} was cut short: {label} ends at byte {offset + num_bytes}, and the file has {length_bytes}",
            path=data.path,
            offset=offset,
            wanted_bytes=num_bytes,
            got_bytes=max(0, length_bytes - offset),
            errno=0,
        )


def _damaged(data: DataFile, label: str, offset: int, num_bytes: int) -> OffloadIOError:
    return OffloadIOError(
        f"{label} in {data.path} is damaged: the checksum of {format_bytes(num_bytes)} at byte {offset} does not match "
        "what was written",
        path=data.path,
        offset=offset,
        wanted_bytes=num_bytes,
        got_bytes=num_bytes,
        errno=0,
    )
