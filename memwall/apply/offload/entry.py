"""Holds what `ActivationOffload` remembers: parked storage ranges, and what autograd has in place of tensors."""

import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memwall.apply.blocks.counts import BlockCounts
from memwall.planning.techniques.offload import LeavingForm
from memwall.store.disk_tier import StorageTier
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.storages import StorageWeakRef

_EMPTY: dict[tuple[torch.device, torch.dtype], Tensor] = {}


class Group(NamedTuple):
    """Says what tensors that a thread saves now belong to."""

    key: Hashable = None
    counts: BlockCounts | None = None
    form: LeavingForm = "exact"


def byte_range(tensor: Tensor, storage_bytes: int, alignment_bytes: int) -> tuple[int, int]:
    """Returns the bytes of its storage that must move for `tensor`: [start, end).

    A view that spans more than half of its storage takes the whole: its siblings (query, key and value in one matrix)
    then find the bytes moved already. A smaller one takes its own span, from an aligned start.
    """
    num_items = tensor.numel()
    if num_items == 0:
        return 0, 0
    if not tensor.is_contiguous():
        num_items = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    end = start + num_items * tensor.itemsize
    if 2 * (end - start) > storage_bytes:
        return 0, storage_bytes
    return start // alignment_bytes * alignment_bytes, end


@dataclass(slots=True, eq=False)
class Entry:
    """Holds a storage range that is parked on a tier, shared by all saved views of it."""

    tier: StorageTier[Any, Any]
    parked: Any
    label: str
    start: int
    num_bytes: int
    """Counts the bytes of the range; `parked` may be smaller."""
    device: torch.device
    key: Hashable
    group: Hashable
    source: StorageWeakRef
    """While this lives, no other storage can take the address in `key`."""
    guard: Tensor
    """Belongs to the tensor for which the range was sent away last."""
    number: int = -1
    older: "Entry | None" = None
    newer: "Entry | None" = None
    load: Any = None
    """Bytes on their way back, or back and waiting."""
    num_handles: int = 0
    num_unread: int = 0
    """Handles that backward has not asked for yet."""
    _restored: "weakref.ref[torch.UntypedStorage] | None" = None
    _restored_offset: int = 0
    _restored_guard: Tensor | None = None
    _restored_version: int = 0

    def remember(self, buffer: Tensor) -> None:
        """Lets later readers share `buffer` for as long as somebody else keeps it, and nobody writes into it."""
        self._restored = weakref.ref(buffer.untyped_storage())
        self._restored_offset = int(buffer.storage_offset())
        self._restored_guard, self._restored_version = guard_of(buffer), version_of(buffer)

    @property
    def was_written(self) -> bool:
        """Returns whether a reader wrote into the remembered buffer: autograd may make a gradient of it."""
        return self._restored_guard is not None and version_of(self._restored_guard) != self._restored_version

    def restored_buffer(self) -> Tensor | None:
        """Returns the buffer last remembered, if it still lives and is as it was."""
        if self._restored is None or self._restored_guard is None or self.was_written:
            return None
        storage = self._restored()
        if storage is None:
            return None
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return _sharing(self._restored_guard, view.set_(storage, self._restored_offset, (self.num_bytes,), (1,)))


class EntryList:
    """Holds entries in the order they were parked; any of them leaves at the same small cost."""

    def __init__(self) -> None:
        self._newest: Entry | None = None
        self._num_entries = 0
        self._next_number = 0

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, entry: Entry) -> bool:
        return entry.number >= 0

    def __iter__(self) -> Iterator[Entry]:
        entry = self._newest
        while entry is not None:
            yield entry
            entry = entry.older

    def append(self, entry: Entry) -> None:
        """Adds `entry` as the newest."""
        entry.number = self._next_number
        self._next_number += 1
        entry.older = self._newest
        if self._newest is not None:
            self._newest.newer = entry
        self._newest = entry
        self._num_entries += 1

    def remove(self, entry: Entry) -> None:
        """Takes `entry` out."""
        if entry.older is not None:
            entry.older.newer = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        else:
            self._newest = entry.older
        entry.older = entry.newer = None
        entry.number = -1
        self._num_entries -= 1


class Saved:
    """Holds the geometry of a saved tensor whose bytes are parked, and a guard that sees in-place writes to it."""

    __slots__ = ("_dead", "_guard", "_is_read", "_offset_bytes", "dtype", "entry", "shape", "stride", "version")

    def __init__(self, tensor: Tensor, guard: Tensor, entry: Entry, dead: "deque[tuple[Entry, bool]]") -> None:
        self._is_read = False
        self._dead = dead
        self.entry = entry
        entry.num_handles += 1
        entry.num_unread += 1
        self.version = version_of(tensor)
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self._offset_bytes = tensor.storage_offset() * tensor.itemsize - entry.start
        self._guard = guard

    def __del__(self) -> None:
        self._dead.append((self.entry, self._is_read))

    @property
    def label(self) -> str:
        """Returns what it is and where it was saved, for an error."""
        return self.entry.label

    def current_version(self) -> int:
        """Returns how often the source has been written by now."""
        return version_of(self._guard)

    def was_modified(self) -> bool:
        """Returns whether the source was written since it was saved."""
        return version_of(self._guard) != self.version

    def mark_read(self) -> None:
        """Notes that backward has asked for it."""
        if not self._is_read:
            self._is_read = True
            self.entry.num_unread -= 1

    def view_of(self, buffer: Tensor) -> Tensor:
        """Returns the tensor, with its strides, in the bytes of its entry; it shares their version counter."""
        offset_bytes = int(buffer.storage_offset()) + self._offset_bytes
        view = torch.empty(0, dtype=self.dtype, device=buffer.device)
        view.set_(buffer.untyped_storage(), offset_bytes // self.dtype.itemsize, self.shape, self.stride)
        return _sharing(buffer, view)


def guard_of(tensor: Tensor) -> Tensor:
    """Returns an alias that shares the tensor's version counter but none of its memory."""
    place = (tensor.device, tensor.dtype)
    empty = _EMPTY.get(place)
    if empty is None:
        empty = _EMPTY[place] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _sharing(tensor, empty)


def _sharing(counter: Tensor, data: Tensor) -> Tensor:
    """Returns `data` as a tensor that counts its writes together with `counter`."""
    tensor = counter.detach()
    tensor.data = data
    return tensor
