"""An optimizer's state in pinned host memory, for parameters on CUDA: copies on own streams, kept in order by events.

The compute stream is whatever stream is current when a step begins. The host never waits: to wait for a copy is to have
the compute stream wait for it. So what a ring of buffers does in program order, the device does in the same order:

- state comes in after all that was launched before it was asked for, which may use the memory of its buffer still, and
  after the buffer was written from;
- the step of a bucket comes after its copy in;
- the copy out comes after the step, and buffers are freed after the last copy out.

`record_stream` is not used: it delays reuse without a bound.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.buckets import Bucket, BucketBuffer
from memwall.store.pinned_arena import PinnedArena, PinnedSlot
from memwall.store.room import with_room
from memwall.units import format_bytes


@dataclass(frozen=True, slots=True)
class StreamCopy:
    """Is a copy on a stream of its own, done when `done` has happened."""

    done: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Has what is launched on the current stream from now on come after it."""
        torch.cuda.current_stream(self.device).wait_event(self.done)


class PinnedSpace:
    """Holds pinned host memory in the size of the state that is in it, and the streams to it and from it.

    Args:
        device: the CUDA device of the parameters.
        limit_bytes: the most to pin.
    """

    kept = "in host memory"
    place = "in pinned host memory"

    def __init__(self, device: torch.device, *, limit_bytes: int) -> None:
        self.device = device
        self._limit_bytes = limit_bytes
        self._arena = PinnedArena(limit_bytes, chunk_bytes=0, device=device)
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)
        self.bytes_written = self.bytes_read = 0
        # Of state whose optimizer is dropped nobody closes this; the arena alone would leave its maps registered.
        streams = (self._outward, self._inward)
        weakref.finalize(self, _unpin_forgotten, self._arena, streams, os.getpid()).atexit = False

    @property
    def pinned_bytes(self) -> int:
        """Counts the bytes that are pinned now, free slots included."""
        return self._arena.pinned_bytes

    def taken_bytes(self, tier: str) -> int:
        """Counts what is taken of a tier."""
        return self.pinned_bytes if tier == "host" else 0

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the most to pin."""
        self._limit_bytes = limit_bytes
        self._arena.set_limit(limit_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Returns if so much may be pinned; nothing is before there is state to put there."""
        if num_bytes > self._limit_bytes:
            raise StoreError(
                f"the optimizer's state needs {format_bytes(num_bytes)} of pinned host memory, and "
                f"{format_bytes(self._limit_bytes)} can be had; free host memory, or plan for more of the device's"
            )

    def trim(self) -> None:
        """Gives up memory that buckets pass through: they pass through none."""

    def bucket(self, label: str) -> "PinnedBucket":
        """Returns a new bucket."""
        return PinnedBucket(self)

    def successor(self, slot: PinnedSlot | None, num_bytes: int) -> PinnedSlot:
        """Returns the slot for what takes the place of `slot`'s contents: the same one where it is large enough.

        Raises:
            StoreError: the limit, or the driver, does not allow it.
        """
        if slot is not None and slot.num_bytes < num_bytes:
            self.free(slot)
            slot = None
        return slot if slot is not None else self._arena.allocate(num_bytes)

    def free(self, slot: PinnedSlot) -> None:
        """Takes a slot back, and unpin what nobody uses; waits for copies, and is no part of a usual step."""
        self._synchronize()
        self._arena.free(slot)
        self._arena.trim()

    def copy_in(self, slot: PinnedSlot, memory: Tensor, after: StreamCopy | None) -> StreamCopy:
        """Begins to fill `memory` (uint8, one dimension, on the device) from a slot.

        Args:
            after: the copy out of `memory` that comes first.
        """
        self._inward.wait_stream(self._compute())
        if after is not None:
            self._inward.wait_event(after.done)
        with torch.cuda.stream(self._inward):
            memory.copy_(slot.memory[: memory.numel()], non_blocking=True)
        self.bytes_read += memory.numel()
        return StreamCopy(self._inward.record_event(), self.device)

    def copy_out(self, slot: PinnedSlot, tensors: Sequence[tuple[Tensor, int]]) -> StreamCopy:
        """Begins to write dense tensors into a slot, each to its offset in bytes.

        The current stream must have waited for the slot's last copy in.
        """
        self._outward.wait_stream(self._compute())
        for tensor, offset in tensors:
            there = _in_slot(slot, tensor, offset)
            with torch.cuda.stream(self._outward):
                there.copy_(tensor, non_blocking=True)
            self.bytes_written += tensor.numel() * tensor.element_size()
        return StreamCopy(self._outward.record_event(), self.device)

    def copies(self, slot: PinnedSlot, tensors: Sequence[tuple[Tensor, int]], device: torch.device) -> list[Tensor]:
        """Returns tensors like these on a device, with what a slot has at their offsets; waits for copies.

        One by one, so that a GPU needs room for them alone.
        """
        self._synchronize()
        return [with_room(partial(_in_slot(slot, tensor, offset).to, device, copy=True)) for tensor, offset in tensors]

    def close(self) -> None:
        """Unpins everything."""
        self._synchronize()
        self._arena.close()

    def _synchronize(self) -> None:
        self._outward.synchronize()
        self._inward.synchronize()

    def _compute(self) -> torch.cuda.Stream:
        """Returns the stream that steps."""
        if torch.cuda.is_current_stream_capturing():
            raise StoreError(
                "an optimizer's step is being captured into a CUDA graph, and its state is in host memory between "
                "steps, or parameters are; leave that out of the graph, or plan without moving optimizer state"
            )
        return torch.cuda.current_stream(self.device)


class PinnedBucket(Bucket[StreamCopy]):
    """Keeps tensors of a CUDA device in a slot of pinned host memory."""

    def __init__(self, space: PinnedSpace) -> None:
        super().__init__(space.device)
        self._space = space
        self._slot: PinnedSlot | None = None

    def copies(self, device: torch.device | None = None) -> dict[int, Tensor]:
        """Takes each tensor from the slot by itself: a device may have no room for the bucket beside what it held."""
        if self._slot is None or not self.num_bytes:
            return {}
        places = [(piece.away, piece.offset) for piece in self._pieces]
        copies = self._space.copies(self._slot, places, device or self.home)
        return {id(away): copy for (away, _), copy in zip(places, copies, strict=True)}

    def drop_read(self) -> None:
        """Gives up a read: whoever gets the buffer's memory next comes after the copy into it."""
        if self._read is not None:
            self._read.wait()
        super().drop_read()

    def _read_into(self, buffer: BucketBuffer, after: StreamCopy | None) -> StreamCopy:
        assert self._slot is not None
        return self._space.copy_in(self._slot, buffer.bytes_of(self.num_bytes), after)

    def _write_from(self, buffer: BucketBuffer, num_bytes: int) -> StreamCopy:
        return self._write_each([(buffer.bytes_of(num_bytes), 0)], num_bytes, None)

    def _write_each(
        self, tensors: Sequence[tuple[Tensor, int]], num_bytes: int, passing: BucketBuffer | None
    ) -> StreamCopy:
        """Begins to write tensors, without a copy on the device, which would take as much as they do once more."""
        self._slot = self._space.successor(self._slot, num_bytes)
        return self._space.copy_out(self._slot, tensors)

    def _free_place(self) -> None:
        if self._slot is not None:
            self._space.free(self._slot)
            self._slot = None


def _unpin_forgotten(arena: PinnedArena, streams: Sequence[torch.cuda.Stream], process_id: int) -> None:
    """Unpins what an arena has left, in its own process: a forked one has no context to do so."""
    if arena.pinned_bytes and process_id == os.getpid():
        for stream in streams:
            stream.synchronize()
        arena.close()


def _in_slot(slot: PinnedSlot, like: Tensor, offset: int) -> Tensor:
    """Returns what lies at an offset of a slot, in bytes, as a tensor with the dtype, shape and strides of `like`."""
    start = (int(slot.memory.storage_offset()) + offset) // like.element_size()
    there = torch.empty(0, dtype=like.dtype, device=slot.memory.device)
    return there.set_(slot.memory.untyped_storage(), start, like.size(), like.stride())
