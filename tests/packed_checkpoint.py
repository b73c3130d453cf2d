"""A small checkpoint as one file of MessagePack, so that a fuzzer changes its values, and digests are made of these."""

from pathlib import Path
from typing import Any

import msgspec

from memwall.store.commit_format import (
    COMMIT_BYTES,
    COMMIT_NAME,
    DATA_NAME,
    Record,
    Superblock,
    decode_meta,
    decode_record,
    decode_superblock,
    digest_of,
    encode_record,
    encode_superblock,
    record_offset,
)

__all__ = ["packed", "unpacked"]

_BLOCK = COMMIT_BYTES // 3


def packed(folder: Path) -> bytes:
    """Returns the last step of a checkpoint of a process alone: its contents as values, and its data file."""
    commit, data = (folder / COMMIT_NAME).read_bytes(), (folder / DATA_NAME).read_bytes()
    records = [decode_record(commit[start : start + _BLOCK]) for start in (_BLOCK, 2 * _BLOCK)]
    last = max((one for one in records if one is not None), key=lambda one: one.generation)
    meta = decode_meta(data[last.meta_offset :][: last.meta_bytes])
    data = data[: max(bucket.offset + bucket.slot_bytes for bucket in meta.buckets)]
    return msgspec.msgpack.encode(
        {
            "block_bytes": decode_superblock(commit[:_BLOCK], "").block_bytes,
            "generation": last.generation,
            "step": last.step,
            "buckets": [msgspec.structs.asdict(bucket) for bucket in meta.buckets],
            "content": msgspec.msgpack.decode(meta.content),
            "data": data,
        }
    )


def unpacked(data: bytes) -> tuple[bytes, bytes] | None:
    """Returns a commit file and a data file with such contents; None where these bytes are none."""
    try:
        found: Any = msgspec.msgpack.decode(data)
        content = msgspec.msgpack.encode(found["content"])
        numbers = {name: found[name] for name in ("generation", "step")}
        whole = memoryview(found["data"]).tobytes()
        meta = msgspec.msgpack.encode({**numbers, "buckets": found["buckets"], "content": content})
        offset = -(-len(whole) // _BLOCK) * _BLOCK
        record = Record(
            run_id=bytes(16), meta_offset=offset, meta_bytes=len(meta), meta_digest=digest_of(meta), **numbers
        )
        commit = bytearray(COMMIT_BYTES)
        commit[:_BLOCK] = encode_superblock(
            Superblock(run_id=bytes(16), fingerprint=bytes(16), block_bytes=found["block_bytes"])
        )
        place = record_offset(record.generation)
        commit[place : place + _BLOCK] = encode_record(record)
    except Exception:  # bytes that are no such file
        return None
    padded = -(-len(meta) // _BLOCK) * _BLOCK
    return bytes(commit), whole.ljust(offset, b"\0") + meta.ljust(padded, b"\0")
