"""Rows in a file: one shard of a table, written and read as a stream, so that neither side ever holds the table.

A file is a header and chunks of rows, each with its crc32, and an end mark with the number of rows: a file that was cut
short, altered, or belongs to something else is told apart before a row of it is used.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from memwall.errors import OffloadIOError, StoreError
from memwall.rows.initial import InitialRows
from memwall.rows.store import RowLayout
from memwall.store.transfer import memory_at
from memwall.units import format_bytes

_MAGIC = b"MWROWS01"
_LENGTH_AND_CRC = struct.Struct("<II")
_NUM_ROWS = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})\.rows")


class ShardHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what a shard says of itself."""

    save_id: str
    """It is the same in all shards that were saved together."""
    shard: int
    num_shards: int
    """Row `id` is in shard `id % num_shards`."""
    num_ids: int
    """Ids are 0 to num_ids - 1."""
    layout: RowLayout
    initial: InitialRows
    lineage: int
    """It is the same for all saves of one table."""
    num_updates: int
    step_count: float | None
    """It is the optimizer's own count of steps; None where it keeps none."""


def shard_path(folder: str | os.PathLike[str], shard: int, num_shards: int) -> Path:
    """Returns where a shard lies in a folder."""
    return Path(folder) / f"shard-{shard:05d}-of-{num_shards:05d}.rows"


def shard_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns all shards in a folder, in their order.

    Raises:
        StoreError: there are none, or some are missing, or there are those of two saves.
    """
    place = Path(folder)
    found = {path: name for path in sorted(place.glob("*.rows")) if (name := _NAME.fullmatch(path.name))}
    if not found:
        raise StoreError(f"{place} holds no shards of a table of rows; give the folder that save(folder) wrote")
    counts = {int(name.group(2)) for name in found.values()}
    shards = [int(name.group(1)) for name in found.values()]
    if len(counts) > 1 or shards != list(range(*counts)):
        raise StoreError(
            f"{place} should hold shards 0 to {max(counts) - 1} of {max(counts)}, and holds "
            f"{', '.join(path.name for path in found)}; give a folder with the shards of one save, all of them"
        )
    return list(found)


def write_shard(path: Path, header: ShardHeader, chunks: Iterable[tuple[Tensor, Tensor]]) -> int:
    """Writes a new file; returns the number of rows in it.

    Args:
        path: must not exist.
        header: what it says of itself.
        chunks: ids int64 [n] and records [n, elements], n > 0.

    Raises:
        OffloadIOError: the disk is full, or fails.
        StoreError: the file exists, or cannot be made; or the rows cannot be read.
    """
    num_rows = 0
    try:
        with path.open("xb") as file:
            text = msgspec.json.encode(header)
            file.write(_MAGIC + _LENGTH_AND_CRC.pack(len(text), zlib.crc32(text)) + text)
            for ids, records in chunks:
                parts = [_bytes_of(ids.contiguous()), _bytes_of(records.contiguous())]
                file.write(_LENGTH_AND_CRC.pack(ids.numel(), zlib.crc32(parts[1], zlib.crc32(parts[0]))))
                for part in parts:
                    file.write(part)
                num_rows += ids.numel()
            end = _NUM_ROWS.pack(num_rows)
            file.write(_LENGTH_AND_CRC.pack(0, zlib.crc32(end)) + end)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except FileExistsError as error:
        raise StoreError(f"{path} exists already; save to a new folder") from error
    except OSError as error:
        raise OffloadIOError(
            f"writing {path} failed after {num_rows} rows: {os.strerror(error.errno or 0)} (errno {error.errno}); "
            "free space there or save to another folder",
            path=str(path),
            offset=0,
            wanted_bytes=0,
            got_bytes=0,
            errno=error.errno or 0,
        ) from error
    return num_rows


def read_header(path: Path) -> ShardHeader:
    """Returns what a shard says of itself.

    Raises:
        StoreError: the file cannot be read, is no shard, or was altered.
    """
    with _opened(path) as file:
        return _header(path, file)


def read_rows(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the rows of a shard, as ids int64 [n] and records [n, elements], each chunk checked first.

    Raises:
        StoreError: the file cannot be read, is no shard, was cut short, or was altered.
    """
    num_rows = 0
    with _opened(path) as file:
        header = _header(path, file)
        row_bytes = 8 + header.layout.row_bytes
        while True:
            size, checksum = _LENGTH_AND_CRC.unpack(_read(path, file, _LENGTH_AND_CRC.size))
            body = _read(path, file, size * row_bytes if size else _NUM_ROWS.size)
            if zlib.crc32(body) != checksum:
                raise _altered(path, f"the rows from number {num_rows} on")
            if not size:
                break
            ids = torch.frombuffer(body, dtype=torch.int64, count=size)
            records = torch.frombuffer(body, dtype=header.layout.torch_dtype, offset=8 * size)
            num_rows += size
            yield ids, records.view(size, header.layout.num_elements)
            os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
        if _NUM_ROWS.unpack(body)[0] != num_rows or file.read(1):
            raise _altered(path, "its end mark")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {os.strerror(error.errno or 0)} (errno {error.errno})") from error


def _header(path: Path, file: BinaryIO) -> ShardHeader:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise StoreError(f"{path} is no shard of a table of rows: it does not begin with {_MAGIC.decode()}")
    size, checksum = _LENGTH_AND_CRC.unpack(_read(path, file, _LENGTH_AND_CRC.size))
    if size > _MAX_HEADER_BYTES:
        raise _altered(path, "its header")
    text = _read(path, file, size)
    if zlib.crc32(text) != checksum:
        raise _altered(path, "its header")
    try:
        return msgspec.json.decode(text, type=ShardHeader)
    except msgspec.ValidationError as error:
        raise StoreError(f"{path} was written by another version of memwall: {error}") from error


def _read(path: Path, file: BinaryIO, num_bytes: int) -> bytearray:
    """Returns exactly so many bytes; of a damaged length no more is allocated than there is in the file."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if left < num_bytes:
        raise StoreError(
            f"{path} was cut short: {format_bytes(num_bytes)} more were expected at byte {file.tell()}, "
            f"{format_bytes(left)} are there; use another copy of it"
        )
    found = bytearray(num_bytes)
    try:
        count = file.readinto(found)  # type: ignore[attr-defined]
    except OSError as error:
        raise StoreError(f"reading {path} failed: {os.strerror(error.errno or 0)} (errno {error.errno})") from error
    if count != num_bytes:
        raise StoreError(f"{path} was cut short while it was read: {count} of {num_bytes} bytes were there")
    return found


def _altered(path: Path, what: str) -> StoreError:
    return StoreError(f"{path} was altered: the checksum of {what} does not match; use another copy of it")


def _bytes_of(tensor: Tensor) -> memoryview:
    return memory_at(tensor.data_ptr(), tensor.nbytes)
