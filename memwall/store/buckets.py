"""Tensors that live elsewhere while nobody uses them: a bucket is a few of them, read and written as one.

Elsewhere is a disk here; `Bucket` does not depend on it.

The owner of the tensors is a dictionary (an optimizer keeps one per parameter). While a bucket is away, the dictionary
holds a tensor of the same shape on the meta device in each one's place: reading numbers out of it raises.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.away_tensor import away_like
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.room import with_room
from memwall.store.scratch import Slot
from memwall.store.transfer import TransferPool, memory_at
from memwall.store.workers import Transfer

# Kernels load whole vectors; torch's own allocations begin at such a boundary as well.
_TENSOR_ALIGNMENT_BYTES = 64

Entry = tuple[dict[Any, Any], Any]
"""Names a dictionary and the key under which it holds a tensor."""


class Move(Protocol):
    """Tells when bytes on their way have come."""

    def wait(self) -> object:
        """Returns once whoever goes on from here finds them moved.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """


M = TypeVar("M", bound=Move)

_CPU = torch.device("cpu")


def can_move(value: object, min_bytes: int, device: torch.device = _CPU) -> bool:
    """Returns whether a value is a plain tensor on a device whose elements can be written and read back as they lie."""
    return (
        type(value) is Tensor
        and value.device == device
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() * value.element_size() >= max(1, min_bytes)
        and is_dense(value)
    )


def padded_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes that tensors of these sizes take in a bucket's memory."""
    return round_up(sum(round_up(size, _TENSOR_ALIGNMENT_BYTES) for size in sizes))


class BucketBuffer:
    """Holds a bucket in use, page-aligned; torch allocates the memory, so that it lies where other tensors lie.

    Args:
        memory: what to lie in instead (uint8, one dimension, in whole pages); the caller has it for as long.
    """

    def __init__(self, num_bytes: int, device: torch.device = _CPU, memory: Tensor | None = None) -> None:
        self.num_bytes = round_up(num_bytes)
        size = self.num_bytes + ALIGNMENT_BYTES
        if memory is None:
            memory = with_room(lambda: torch.empty(size, dtype=torch.uint8, device=device))
        self.memory = memory
        address = self.memory.data_ptr()
        self._skipped_bytes = round_up(address) - address
        self._address = address + self._skipped_bytes

    def view(self, num_bytes: int) -> memoryview:
        """Returns the first bytes, of a buffer on a CPU; whoever uses them keeps `memory`."""
        return memory_at(self._address, num_bytes)

    def bytes_of(self, num_bytes: int) -> Tensor:
        """Returns the first bytes (uint8, one dimension)."""
        return self.memory[self._skipped_bytes : self._skipped_bytes + num_bytes]

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """Returns the tensor with the dtype, shape and strides of `like` that lies at `offset`."""
        start = (int(self.memory.storage_offset()) + self._skipped_bytes + offset) // like.element_size()
        empty = torch.empty(0, dtype=like.dtype, device=self.memory.device)
        return empty.set_(self.memory.untyped_storage(), start, like.size(), like.stride())

    def holds(self, tensor: Tensor, offset: int) -> bool:
        """Returns whether a tensor lies at `offset`."""
        return tensor.data_ptr() == self._address + offset


class _Piece(NamedTuple):
    """Names one tensor of a bucket. `away` stands in its place while it is away."""

    holder: dict[Any, Any]
    key: Any
    away: Tensor
    offset: int


class Bucket(ABC, Generic[M]):
    """Keeps tensors of some dictionaries in a place of their own, which is reused at every write.

    Args:
        device: where the tensors are used.
    """

    def __init__(self, device: torch.device) -> None:
        self.home = device
        self._pieces: tuple[_Piece, ...] = ()
        self._read: M | None = None
        self.write: M | None = None
        """Is the last one begun."""
        self.num_bytes = 0
        """Counts what is away, padding included: the buffer that a read needs."""

    @abstractmethod
    def _read_into(self, buffer: BucketBuffer, after: M | None) -> M:
        """Begins to fill `buffer` with all `num_bytes`, once `after` is done."""

    @abstractmethod
    def _write_from(self, buffer: BucketBuffer, num_bytes: int) -> M:
        """Begins to write so many bytes."""

    def _write_each(self, tensors: Sequence[tuple[Tensor, int]], num_bytes: int, passing: BucketBuffer | None) -> M:
        """Begins to write tensors that lie anywhere, each to its offset among so many bytes."""
        source = passing if passing and passing.num_bytes >= num_bytes else self.passing_buffer(num_bytes)
        for tensor, offset in tensors:
            source.tensor(offset, tensor).copy_(tensor)
        return self._write_from(source, num_bytes)

    @abstractmethod
    def _free_place(self) -> None:
        """Gives up where the tensors are while they are away, if there is such a place."""

    def new_buffer(self, num_bytes: int) -> BucketBuffer:
        """Returns memory that such tensors are used in."""
        return BucketBuffer(num_bytes, self.home)

    def passing_buffer(self, num_bytes: int) -> BucketBuffer:
        """Returns memory for tensors that are copied from there, or to there, and used elsewhere."""
        return self.new_buffer(num_bytes)

    def begin_read(self, buffer: BucketBuffer, after: M | None = None) -> None:
        """Begins to fill `buffer`, once the write `after` no longer needs it."""
        if self.num_bytes:
            self._read = self._read_into(buffer, after)

    def finish_read(self, buffer: BucketBuffer | None) -> None:
        """Puts the tensors, which then lie in `buffer`, back into their dictionaries.

        What an owner has put in a tensor's place meanwhile stays there.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        if self._read is None or buffer is None:
            return
        self._read.wait()
        self._read = None
        for piece in self._pieces:
            if piece.holder.get(piece.key) is piece.away:
                piece.holder[piece.key] = buffer.tensor(piece.offset, piece.away)

    def put_away(
        self, entries: Sequence[Entry], buffer: BucketBuffer | None, passing: BucketBuffer | None = None
    ) -> None:
        """Begins to write the tensors at `entries`; from now on they are away.

        Tensors that lie in `buffer` where they were read are written from there; it must not change until `write` is
        done. Others are written on return.

        Args:
            passing: what they may be copied to on their way, of `passing_buffer`. Whoever puts several buckets away
                has one for all: the C library has no use for the memory of one buffer when it makes the next.

        Raises:
            StoreError: no room for them, or a transfer failed.
        """
        pieces, num_bytes = self._laid_out(entries)
        if pieces:
            is_in_place = buffer is not None and all(buffer.holds(p.holder[p.key], p.offset) for p in pieces)
            if buffer is not None and is_in_place:
                self.write = self._write_from(buffer, num_bytes)
            else:
                self.write = self._write_each([(p.holder[p.key], p.offset) for p in pieces], num_bytes, passing)
                self.write.wait()
        else:
            self._free_place()  # what nobody has contents in may be given to others
        self._pieces, self.num_bytes = pieces, num_bytes
        for piece in pieces:
            piece.holder[piece.key] = piece.away

    def wait_for_write(self) -> None:
        """Returns once the last write is done.

        Raises:
            StoreError: it failed.
        """
        if self.write is not None:
            self.write.wait()
            self.write = None

    def cancel_read(self) -> None:
        """Has no more done of a read than has begun. It is still to be dropped."""

    def drop_read(self) -> None:
        """Gives up a read that nobody has waited for: its buffer may be freed, and is not used."""
        self._read = None

    def copies(self, device: torch.device | None = None) -> dict[int, Tensor]:
        """Returns tensors of their own with what is away, by the id of what stands in their place.

        Args:
            device: where they are to be; by default where they are used.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        if not self.num_bytes:
            return {}
        buffer = self.passing_buffer(self.num_bytes)
        self._read_into(buffer, None).wait()
        return {
            id(piece.away): buffer.tensor(piece.offset, piece.away).to(device or self.home, copy=True)
            for piece in self._pieces
        }

    def bring_back(self, device: torch.device | None = None) -> None:
        """Puts the tensors back into their dictionaries for good, each in memory of its own.

        Args:
            device: where they are to be; by default where they are used.

        Raises:
            StoreError: the bytes cannot be had, or came back different; then they stay away.
        """
        copies = self.copies(device)
        for piece in self._pieces:
            if piece.holder.get(piece.key) is piece.away:
                piece.holder[piece.key] = copies[id(piece.away)]
        self.forget()

    def pieces_away(self) -> list[tuple[Entry, Tensor, int]]:
        """Lists where each tensor that is away belongs, what stands in its place, and its offset in the bucket."""
        return [
            ((piece.holder, piece.key), piece.away, piece.offset)
            for piece in self._pieces
            if piece.holder.get(piece.key) is piece.away
        ]

    def release(self) -> None:
        """Gives up what is away, and its place."""
        self.forget()
        self._free_place()

    def forget(self) -> None:
        """Gives up what is away; its place stays."""
        self._pieces, self.num_bytes = (), 0

    def _laid_out(self, entries: Sequence[Entry]) -> tuple[tuple[_Piece, ...], int]:
        """Decides where each tensor goes: where it was before, if these are the same as before."""
        if len(entries) == len(self._pieces) and all(
            holder is piece.holder and key == piece.key and _are_alike(holder[key], piece.away)
            for (holder, key), piece in zip(entries, self._pieces, strict=True)
        ):
            return self._pieces, self.num_bytes
        pieces, offset = [], 0
        for holder, key in entries:
            tensor: Tensor = holder[key]
            pieces.append(_Piece(holder, key, away_like(tensor, self), offset))
            offset += round_up(tensor.numel() * tensor.element_size(), _TENSOR_ALIGNMENT_BYTES)
        return tuple(pieces), round_up(offset)


class DiskBucket(Bucket[Transfer]):
    """Keeps tensors in a slot on disk.

    Args:
        pool: the threads and the file.
        label: names the bucket in an error.
        device: where the tensors are used; of another than the CPU they pass through what `passing_buffer` returns.
    """

    def __init__(self, pool: TransferPool, label: str, device: torch.device = _CPU) -> None:
        super().__init__(device)
        self._pool, self._label = pool, label
        self._slot: Slot | None = None

    @property
    def slot(self) -> Slot | None:
        """Says where the tensors are on disk; None while none are."""
        return self._slot if self.num_bytes else None

    def cancel_read(self) -> None:
        if self._read is not None:
            self._read.cancel()

    def drop_read(self) -> None:
        """Gives a read up, of which nothing is under way on return: it would meet what is written there next."""
        self.cancel_read()
        if self._read is not None:
            with suppress(StoreError):
                self._read.wait()
        super().drop_read()

    def _read_into(self, buffer: BucketBuffer, after: Transfer | None) -> Transfer:
        assert self._slot is not None
        return self._pool.read(
            self._slot, buffer.view(self.num_bytes), label=self._label, keep=buffer.memory, after=after
        )

    def _write_from(self, buffer: BucketBuffer, num_bytes: int) -> Transfer:
        self._slot = self._pool.scratch.successor(self._slot, num_bytes)
        return self._pool.write(self._slot, buffer.view(num_bytes), label=self._label, keep=buffer.memory)

    def _free_place(self) -> None:
        if self._slot is not None:
            self._pool.scratch.free(self._slot)
            self._slot = None


class DiskSpace:
    """Makes buckets of CPU tensors in one file.

    Args:
        pool: the threads and the file; the caller closes it.
    """

    kept = "on disk"
    device = _CPU

    def __init__(self, pool: TransferPool) -> None:
        self._pool = pool

    @property
    def place(self) -> str:
        """Says where, with the directory; for messages."""
        return f"on disk in {self._pool.scratch.path}"

    @property
    def bytes_written(self) -> int:
        """Counts the bytes that have left so far."""
        return self._pool.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes that have come back so far."""
        return self._pool.bytes_read

    def taken_bytes(self, tier: str) -> int:
        """Counts what is taken of a tier."""
        return self._pool.scratch.reserved_bytes if tier == "disk" else 0

    def reserve(self, num_bytes: int) -> None:
        """Takes disk space ahead.

        Raises:
            StoreError: there is not so much.
        """
        self._pool.scratch.reserve(num_bytes)

    def trim(self) -> None:
        """Gives up memory that buckets pass through and none is in: of tensors on a CPU none is kept."""

    def bucket(self, label: str) -> DiskBucket:
        """Returns a new bucket, which `label` names in an error."""
        return DiskBucket(self._pool, label)


def drop_reads(buckets: Collection[Bucket[Any]]) -> None:
    """Gives up the reads of several: of those that follow the first one under way no block is read."""
    for bucket in buckets:
        bucket.cancel_read()
    for bucket in buckets:
        bucket.drop_read()


def is_dense(tensor: Tensor) -> bool:
    """Returns whether its elements lie side by side, in whatever order of dimensions, and so fill a range of bytes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _are_alike(tensor: Tensor, away: Tensor) -> bool:
    return tensor.dtype == away.dtype and tensor.size() == away.size() and tensor.stride() == away.stride()
