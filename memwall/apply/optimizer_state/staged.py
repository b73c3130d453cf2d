"""An optimizer's state on disk, for parameters on CUDA: it passes through pinned host memory, a bucket at a time.

Threads carry buckets between the disk and the host's memory, as they do for parameters on a CPU. From there they are
copied on the stream that steps, in its order: the link is much faster than a disk, whose threads go on meanwhile. The
host waits for a copy down, since a thread cannot.
"""

import weakref

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.buckets import BucketBuffer, DiskBucket, DiskSpace
from memwall.store.pinned_arena import PinnedArena, PinnedSlot
from memwall.store.transfer import TransferPool
from memwall.store.workers import Transfer


class _LastCopy:
    """Knows the last copy between a device and some pinned memory."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Returns once it is done."""
        if self.event is not None:
            self.event.synchronize()


class _Stage(BucketBuffer):
    """Is pinned memory that is lent to a bucket."""

    def __init__(self, num_bytes: int, memory: Tensor, last: _LastCopy) -> None:
        super().__init__(num_bytes, memory=memory)
        self.last = last


class _Stages:
    """Lends pinned memory that buckets pass through, in whole pages; what comes back is lent again.

    Args:
        limit_bytes: the most to pin.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._arena = PinnedArena(limit_bytes, chunk_bytes=0, device=device)
        self._free: list[tuple[PinnedSlot, _LastCopy]] = []

    @property
    def pinned_bytes(self) -> int:
        return self._arena.pinned_bytes

    def lend(self, num_bytes: int) -> "_Stage":
        """Returns memory that comes back when nobody has the buffer any more."""
        enough = [one for one in self._free if one[0].num_bytes >= num_bytes]
        if enough:
            slot, last = found = min(enough, key=lambda one: one[0].num_bytes)
            self._free.remove(found)
            last.wait()
        else:
            self.trim()  # buffers of a ring, say, before a larger one that is alone
            slot, last = self._arena.allocate(num_bytes), _LastCopy()
        memory = slot.memory[:]  # which threads that carry it hold as well
        weakref.finalize(memory, self._free.append, (slot, last)).atexit = False
        return _Stage(num_bytes, memory, last)

    def close(self) -> None:
        """Unpins everything."""
        self._free.clear()
        self._arena.close()

    def trim(self) -> None:
        """Unpins what nobody has."""
        while self._free:
            slot, last = self._free.pop()
            last.wait()
            self._arena.free(slot)
        self._arena.trim()


class _StagedBuffer(BucketBuffer):
    """Holds a bucket in use on a device, and the pinned memory through which it comes and goes."""

    def __init__(self, num_bytes: int, device: torch.device, stage: _Stage) -> None:
        super().__init__(num_bytes, device)
        self.stage = stage

    def go_up(self, num_bytes: int) -> None:
        """Fills the device's memory from the stage, for what is launched from now on."""
        self._copy(self.bytes_of(num_bytes), self.stage.bytes_of(num_bytes))

    def go_down(self, num_bytes: int) -> None:
        """Fills the stage from the device's memory, after what was launched so far."""
        self._copy(self.stage.bytes_of(num_bytes), self.bytes_of(num_bytes))

    def settle(self) -> None:
        """Returns once nothing is copied from the stage or to it."""
        self.stage.last.wait()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self.stage.last.event = torch.cuda.current_stream(self.memory.device).record_event()


class StagedSpace(DiskSpace):
    """Makes buckets of a CUDA device's tensors in one file.

    Args:
        pool: the threads and the file; the caller closes it, after this.
        limit_bytes: the most host memory to pin.
    """

    def __init__(self, pool: TransferPool, device: torch.device, *, limit_bytes: int) -> None:
        super().__init__(pool)
        self.device = device
        self._stages = _Stages(limit_bytes, device)

    @property
    def pinned_bytes(self) -> int:
        """Counts the bytes that are pinned now."""
        return self._stages.pinned_bytes

    def bucket(self, label: str) -> "StagedBucket":
        """Returns a new bucket, which `label` names in an error."""
        return StagedBucket(self._pool, label, self.device, self._stages)

    def trim(self) -> None:
        """Unpins what buckets pass through and none is in."""
        self._stages.trim()

    def close(self) -> None:
        """Unpins what buckets passed through."""
        self._stages.close()


class StagedBucket(DiskBucket):
    """Keeps tensors of a CUDA device in a slot on disk."""

    def __init__(self, pool: TransferPool, label: str, device: torch.device, stages: _Stages) -> None:
        super().__init__(pool, label, device)
        self._stages = stages

    def new_buffer(self, num_bytes: int) -> BucketBuffer:
        """Returns memory of the device, and of the host below it.

        Raises:
            StoreError: a step is being captured, and would be played back without what the host does.
        """
        if torch.cuda.is_current_stream_capturing():
            raise StoreError(
                "an optimizer's step is being captured into a CUDA graph, and its state is on disk between steps; "
                "leave optimizer.step() out of the graph, or plan without moving optimizer state"
            )
        return _StagedBuffer(num_bytes, self.home, self._stages.lend(num_bytes))

    def passing_buffer(self, num_bytes: int) -> BucketBuffer:
        """Returns memory of the host: the device may have no room."""
        return self._stages.lend(num_bytes)

    def finish_read(self, buffer: BucketBuffer | None) -> None:
        if self._read is not None and isinstance(buffer, _StagedBuffer):
            self._read.wait()
            buffer.go_up(self.num_bytes)
        super().finish_read(buffer)

    def _read_into(self, buffer: BucketBuffer, after: Transfer | None) -> Transfer:
        if isinstance(buffer, _StagedBuffer):
            buffer.settle()
            buffer = buffer.stage
        return super()._read_into(buffer, after)

    def _write_from(self, buffer: BucketBuffer, num_bytes: int) -> Transfer:
        if isinstance(buffer, _StagedBuffer):
            buffer.go_down(num_bytes)
            buffer.settle()
            buffer = buffer.stage
        return super()._write_from(buffer, num_bytes)
