"""The files of a checkpoint, byte by byte; see `memwall.store.journal` for when each is written.

`memwall.commit`, three blocks of 4096 bytes, each with its checksum (blake2b) right behind its fields, so that a block
fits one sector of 512 bytes and is on disk as a whole or not at all:

    0     superblock: format, identity of the run, fingerprint of the model, bytes per data checksum
    4096  record of the last committed generation that is even
    8192  record of the last committed generation that is odd

`memwall.data`: extents of buckets, and of the meta that a record points to: where the buckets of its generation are, a
crc32 of each of their blocks, and the content that the training run gave. All integers are little-endian.
"""

import hashlib
import struct

import msgspec
from msgspec import Struct

from memwall.errors import StoreError
from memwall.store.backend import ALIGNMENT_BYTES

FORMAT_VERSION = 1
COMMIT_NAME, DATA_NAME = "memwall.commit", "memwall.data"
COMMIT_BYTES = 3 * ALIGNMENT_BYTES
_SUPERBLOCK_MAGIC, _RECORD_MAGIC = b"MEMWALLS", b"MEMWALLR"
_SUPERBLOCK = struct.Struct("<8sII16s16s")
_RECORD = struct.Struct("<8sI4x16sQQQQ32s")
_DIGEST_BYTES = 32
_LARGEST_BLOCK_BYTES = 256 << 20


class Superblock(Struct, frozen=True, kw_only=True):
    """Is written once, before anything else."""

    run_id: bytes
    """Is 16 random bytes: records of another run are not taken for this one's."""
    fingerprint: bytes
    """Is 16 bytes that two models share only if their tensors have the same names, shapes and types."""
    block_bytes: int
    """Says how much data each crc32 covers."""


class Record(Struct, frozen=True, kw_only=True):
    """Points to a committed generation; its predecessor's stays in the other block."""

    run_id: bytes
    generation: int
    step: int
    meta_offset: int
    meta_bytes: int
    """Leaves padding out."""
    meta_digest: bytes


class Extent(Struct, frozen=True, kw_only=True):
    """Says where a bucket is in the data file."""

    offset: int
    num_bytes: int
    """Counts what was written, a multiple of 4096."""
    slot_bytes: int
    """Counts what is taken from the file."""
    checksums: tuple[int, ...]
    """Has the crc32 of each block of `Superblock.block_bytes`, the last one shorter."""

    def is_sound(self, block_bytes: int) -> bool:
        """Returns whether these can be the place and size of something: the file may be a stranger's."""
        is_placed = self.offset >= 0 and self.offset % ALIGNMENT_BYTES == 0
        is_sized = 0 < self.num_bytes <= self.slot_bytes and self.num_bytes % ALIGNMENT_BYTES == 0
        return is_placed and is_sized and len(self.checksums) == -(-self.num_bytes // block_bytes)


class Meta(Struct, frozen=True, kw_only=True):
    """Is the table of contents that a record points to."""

    generation: int
    step: int
    buckets: tuple[Extent, ...]
    content: bytes


def digest_of(data: bytes | memoryview) -> bytes:
    """Returns 32 bytes of blake2b (RFC 7693)."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def record_offset(generation: int) -> int:
    """Returns where in the commit file a generation's record is."""
    return ALIGNMENT_BYTES * (1 + generation % 2)


def encode_superblock(value: Superblock) -> bytes:
    """Returns one block."""
    fields = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, FORMAT_VERSION, value.block_bytes, value.run_id, value.fingerprint)
    return _block(fields)


def decode_superblock(block: bytes, path: str) -> Superblock:
    """Returns the superblock in a block.

    Raises:
        StoreError: it is damaged, or of a newer format.
    """
    fields = _checked(block, _SUPERBLOCK.size)
    magic, version, block_bytes, run_id, fingerprint = _SUPERBLOCK.unpack(block[: _SUPERBLOCK.size])
    if fields is None or magic != _SUPERBLOCK_MAGIC:
        raise StoreError(
            f"{path} is damaged: its first block is not what memwall wrote; restore it from a copy, or begin anew "
            "with another --checkpoint DIR"
        )
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has checkpoint format {version}, and this memwall reads format {FORMAT_VERSION}: resume with the "
            "memwall that wrote it, or a newer one"
        )
    if not 0 < block_bytes <= _LARGEST_BLOCK_BYTES or block_bytes % ALIGNMENT_BYTES:
        raise StoreError(f"{path} is damaged: it names blocks of {block_bytes} bytes, which memwall does not write")
    return Superblock(run_id=run_id, fingerprint=fingerprint, block_bytes=block_bytes)


def encode_record(value: Record) -> bytes:
    """Returns one block."""
    fields = _RECORD.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        value.run_id,
        value.generation,
        value.step,
        value.meta_offset,
        value.meta_bytes,
        value.meta_digest,
    )
    return _block(fields)


def decode_record(block: bytes) -> Record | None:
    """Returns the record in a block; None where it is damaged or was never written."""
    if _checked(block, _RECORD.size) is None:
        return None
    magic, version, run_id, generation, step, offset, num_bytes, digest = _RECORD.unpack(block[: _RECORD.size])
    if magic != _RECORD_MAGIC or version != FORMAT_VERSION:
        return None
    return Record(
        run_id=run_id,
        generation=generation,
        step=step,
        meta_offset=offset,
        meta_bytes=num_bytes,
        meta_digest=digest,
    )


def encode_meta(value: Meta) -> bytes:
    """Returns the bytes that a record's digest is of."""
    return msgspec.msgpack.encode(value)


def decode_meta(data: bytes) -> Meta:
    """Returns what `encode_meta` was given.

    Raises:
        StoreError: the bytes are no meta.
    """
    try:
        return msgspec.msgpack.decode(data, type=Meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"a checkpoint's table of contents cannot be read: {error}") from error


def is_blank(block: bytes) -> bool:
    """Returns whether a block was reserved and never written."""
    return not any(block)


def _block(fields: bytes) -> bytes:
    return (fields + digest_of(fields)).ljust(ALIGNMENT_BYTES, b"\0")


def _checked(block: bytes, num_bytes: int) -> bytes | None:
    fields = block[:num_bytes]
    return fields if block[num_bytes : num_bytes + _DIGEST_BYTES] == digest_of(fields) else None
