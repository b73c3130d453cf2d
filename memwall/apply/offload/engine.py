"""Saved tensors that wait for backward on another tier: CPU tensors on disk, CUDA tensors in pinned host memory.

`ActivationOffload` owns the bookkeeping (what moves, once, how long it lives, when it comes back); a `StorageTier`
moves the bytes. What moves is a range of a storage, not a tensor: several saved views of it move once and come back
with the strides they had, so that backward runs the same kernels on the same bits."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.offload.entry import Entry, EntryList, Group, Saved, byte_range, guard_of
from memwall.apply.offload.filled_later import is_filled_later
from memwall.apply.offload.loads import Loads
from memwall.apply.offload.packed import PackedTier, can_leave_packed
from memwall.errors import ApplyError, MemwallError
from memwall.planning.techniques.offload import LeavingForm
from memwall.store.closing import Closing
from memwall.store.disk_tier import ByteRange, DiskTier, StorageTier
from memwall.store.pinned_arena import NoPinnedRoomError
from memwall.store.pinned_tier import PinnedTier
from memwall.store.transfer import TransferPool
from memwall.torch_internals.autograd import are_counted_together, execution_is_transformed, version_of
from memwall.torch_internals.compiler import has_compiler, unseen
from memwall.torch_internals.saved import Kept, check_unmodified, described, quiet
from memwall.torch_internals.storages import StorageWeakRef, identity_of

# Restored bytes begin at a 4096-byte boundary, so a range that begins at one too keeps each view's alignment; kernels
# may choose their path by alignment, and another path may round differently.
_RANGE_ALIGNMENT_BYTES = 4096
# All tensors below this together are a small part of a step, and each would cost as much time as a large one.
_LEAST_MOVED_BYTES = 64 << 10


_NO_GROUP = Group()


class ActivationOffload(Closing):
    """Parks the tensors that autograd saves, within a bounded window of memory, and brings them back for backward.

    Args:
        pool: disk for CPU tensors; None leaves CPU tensors where they are. The caller closes it, after this.
        window_bytes: the most memory for bytes on their way out, and again for what comes back ahead and in no group.
        min_bytes: tensors whose storage range is smaller stay.
        is_excluded: True for what must stay: parameters, buffers, and whatever shares a storage with them.
        host_limit_bytes: the most pinned host memory for CUDA tensors; None for no limit.
        owns_pages: which CPU tensors need no copy on their way out, see `DiskTier`.
        holds_sources: whether a CUDA tensor is held until its copy is done. Else its memory is the program's at once,
            whose kernels wait for the copy: while a step is recorded, a tensor is to end when the program drops it.

    Raises:
        StoreError: from `pack` and `unpack`, when the tier is full or fails; from the first `pack`, when the window is
            smaller than two disk blocks.
    """

    def __init__(
        self,
        pool: TransferPool | None,
        *,
        window_bytes: int = 64 << 20,
        min_bytes: int = 1 << 20,
        is_excluded: Callable[[Tensor], bool],
        host_limit_bytes: int | None = None,
        owns_pages: Callable[[int], bool] | None = None,
        holds_sources: bool = True,
    ) -> None:
        self._pool, self._holds_sources = pool, holds_sources
        self._owns_pages = owns_pages
        self._window_bytes = window_bytes
        self._min_bytes = self._planned_min_bytes = max(1, min_bytes)
        self._is_excluded = is_excluded
        self._host_limit_bytes = host_limit_bytes
        self._tiers: dict[torch.device, StorageTier[Any, Any]] = {}
        self._lock = threading.RLock()  # CUDA runs backward, hence unpack, in a thread of its own
        self._entries = EntryList()
        self._by_range: dict[Hashable, Entry] = {}
        self._groups: dict[Hashable, dict[Entry, None]] = {}
        self._active = threading.local()
        self._loads = Loads(window_bytes)
        # Saved handles die in any thread, at any instant, under any lock (garbage collection): they only leave a note
        # here, and the next call acts on it.
        self._dead: deque[tuple[Entry, bool]] = deque()
        self._is_closed = False
        self._moved_bytes = 0
        self.refusal = ""
        """Why saved tensors stayed on a device that were to leave it; "" if none did."""
        self.failure: MemwallError | None = None
        """The first transfer that failed: autograd passes the error through the caller's code, which may drop it."""

    # Counters.

    @property
    def bytes_written(self) -> int:
        """Returns the bytes sent away so far, as they left; a storage range saved several times counts once."""
        return self._moved_bytes

    @property
    def bytes_read(self) -> int:
        """Returns the bytes asked back so far, as they left."""
        return self._loads.restored_bytes

    @property
    def staging_bytes(self) -> int:
        """Returns the resident bytes for copies on their way out: of each disk tier's window, what was used so far."""
        return sum(tier.staging_bytes for tier in self._tiers.values() if isinstance(tier, DiskTier))

    @property
    def num_held(self) -> int:
        """Returns how many storage ranges are parked for a graph that still lives."""
        with self._lock:
            self._reap()
            return len(self._entries)

    # What callers put around a forward, and before a backward.

    def hooks(self) -> saved_tensors_hooks:
        """Returns the context inside which tensors saved for backward are offloaded."""
        if not has_compiler():
            return saved_tensors_hooks(self.pack, self.unpack)
        pack, unpack = _hidden()
        return saved_tensors_hooks(partial(pack, self), partial(unpack, self))

    @contextmanager
    def group(self, key: Hashable, counts: BlockCounts | None = None, form: LeavingForm = "exact") -> Iterator[None]:
        """Has what this thread saves inside belong to `key` (say, a block's path and call), for `prefetch`.

        Args:
            counts: where it is counted what was saved, and what of it left.
            form: in which floating-point numbers leave.
        """
        outer = self._group
        self._active.group = Group(key, counts, form)
        try:
            yield
        finally:
            self._active.group = outer

    def move_from(self, share: float) -> None:
        """Moves from now on what is at least this share (at most 1) of the smallest tensor that moves otherwise.

        Tensors below `_LEAST_MOVED_BYTES` are left where they are all the same, if they are otherwise.
        """
        least_bytes = max(int(self._planned_min_bytes * share), _LEAST_MOVED_BYTES)
        self._min_bytes = min(self._planned_min_bytes, least_bytes)

    def prefetch(self, key: Hashable) -> None:
        """Begins to bring back the group `key`, last saved first; the caller's plan bounds it, not the window."""
        with self._lock, quiet():
            self._reap()
            for entry in reversed(list(self._groups.get(key, ()))):
                if entry.load is None and entry.num_unread > 0:
                    self._loads.begin(entry, is_urgent=False)

    @property
    def _group(self) -> Group:
        return getattr(self._active, "group", _NO_GROUP)

    # The hook pair.

    def pack(self, tensor: Tensor) -> Saved | Kept:
        """Sends `tensor` away, or keeps it; returns what autograd stores in its place."""
        counts, form = self._group.counts, self._group.form
        if counts is not None:
            counts.num_offered += 1
        if not self._can_move(tensor):
            if counts is not None and not isinstance(tensor, nn.Parameter) and _num_bytes(tensor) >= self._min_bytes:
                counts.num_immovable += 1
            return Kept(tensor)
        with self._lock, quiet():
            self._reap()
            if self._is_closed:
                raise ApplyError("the activation offload has been closed; leave its hooks() context first")
            storage = tensor.untyped_storage()
            start, end = byte_range(tensor, storage.nbytes(), _RANGE_ALIGNMENT_BYTES)
            if end - start < self._min_bytes or self._is_excluded(tensor):
                return Kept(tensor)
            guard = guard_of(tensor)  # before anything is queued, for which workers ask for the interpreter
            place = (identity_of(storage), storage.data_ptr(), start, end, version_of(tensor))
            entry = self._by_range.get(place)
            if entry is None and form != "exact":
                entry = self._by_range.get((*place, form, tensor.dtype))
            if entry is not None and not are_counted_together(entry.guard, guard):
                entry = self._with_present_bytes(entry, tensor, guard)
            if entry is None:
                if not can_leave_packed(tensor, end - start):
                    form = "exact"
                try:
                    entry = self._park(tensor, guard, start, end, place, form)
                except NoPinnedRoomError as error:
                    self.refusal = self.refusal or str(error)
                    if counts is not None:
                        counts.stays = counts.stays or str(error)
                    return Kept(tensor)
                except MemwallError as error:
                    self._note_failure(error)
                    raise
            if counts is not None:
                counts.num_moved += 1
            return Saved(tensor, guard, entry, self._dead)

    def unpack(self, saved: Any) -> Tensor:
        """Returns the tensor as it was: same bits, strides and dtype.

        Raises:
            SavedTensorModifiedError: it was written in place in between.
            StoreError: its bytes cannot be had.
        """
        check_unmodified(saved)
        if isinstance(saved, Kept):
            return saved.tensor
        with self._lock, quiet():
            self._reap()
            if self._is_closed:
                raise ApplyError(f"the activation offload was closed before backward asked for {saved.label}")
            try:
                return self._restore(saved)
            except MemwallError as error:
                self._note_failure(error)
                raise

    def reread(self, saved: Saved) -> Tensor:
        """Returns the tensor by what has left so far, for a comparison: nothing is read ahead, and nothing stays.

        Raises:
            StoreError: its bytes cannot be had.
        """
        entry = saved.entry
        with self._lock, quiet():
            self._reap()
            is_loaded = entry.load is not None
            try:
                if not is_loaded:
                    self._loads.begin(entry, is_urgent=True)
                tensor = saved.view_of(entry.tier.collect(entry.load))
            except MemwallError as error:
                self._note_failure(error)
                raise
            if not is_loaded:
                self._loads.drop(entry, is_collected=True)
            return tensor

    # Lifetime.

    def close(self) -> None:
        """Releases every parked byte. A graph that still needs one fails at its backward with an `ApplyError`."""
        with self._lock:
            self._reap()
            self._is_closed = True
            for entry in list(self._entries):
                self._release(entry)
            for tier in self._tiers.values():
                tier.close()

    # How it is done.

    def _note_failure(self, error: MemwallError) -> None:
        self.failure = self.failure or error.without_frames()

    def _can_move(self, tensor: Tensor) -> bool:
        """Returns whether it is a plain dense tensor on a device that has a tier: what is cheap to tell."""
        return (
            type(tensor) is Tensor
            and (tensor.is_cuda or (tensor.is_cpu and self._pool is not None))
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
            and not (execution_is_transformed() or is_filled_later())
        )

    def _tier(self, device: torch.device) -> StorageTier[Any, Any]:
        tier = self._tiers.get(device)
        if tier is None:
            if device.type == "cpu" and self._pool is not None:
                tier = DiskTier(self._pool, window_bytes=self._window_bytes, owns_pages=self._owns_pages)
            else:
                window_bytes = self._window_bytes if self._holds_sources else 0
                tier = PinnedTier(device, window_bytes=window_bytes, limit_bytes=self._host_limit_bytes)
            self._tiers[device] = tier
        return tier

    def _park(
        self,
        tensor: Tensor,
        guard: Tensor,
        start: int,
        end: int,
        place: tuple[Hashable, ...],
        form: LeavingForm,
    ) -> Entry:
        group, storage = self._group.key, tensor.untyped_storage()
        label = described(tensor.dtype, tensor.shape, group)
        tier: StorageTier[Any, Any] = self._tier(tensor.device)
        key = place
        if form != "exact":
            tier, key = PackedTier(tier, tensor.dtype), (*place, form, tensor.dtype)
        entry = Entry(
            tier=tier,
            parked=tier.park(ByteRange(storage, start, end - start), label),
            label=label,
            start=start,
            num_bytes=end - start,
            device=tensor.device,
            key=key,
            group=group,
            source=StorageWeakRef(storage),
            guard=guard,
        )
        self._entries.append(entry)
        self._by_range[key] = entry
        self._groups.setdefault(group, {})[entry] = None
        self._moved_bytes += entry.parked.num_bytes
        return entry

    def _with_present_bytes(self, entry: Entry, tensor: Tensor, guard: Tensor) -> Entry | None:
        """Sends the range of an entry away anew, for a part of it whose writes another counter counts.

        So are the gates of a recurrent cell, which torch makes in place one after the other. Parts that were saved
        before have not changed, or their own counters say so. Returns None where the range is on its way back already,
        or leaves packed, as a whole: then it takes another entry.
        """
        if entry.load is not None or entry.restored_buffer() is not None or isinstance(entry.tier, PackedTier):
            return None
        old = entry.parked
        source = ByteRange(tensor.untyped_storage(), entry.start, entry.num_bytes)
        entry.parked, entry.guard = entry.tier.park(source, entry.label), guard
        self._moved_bytes += entry.parked.num_bytes
        entry.tier.release(old)
        return entry

    def _restore(self, saved: Saved) -> Tensor:
        """Returns the tensor, and reads ahead for those that backward will ask for next."""
        entry = saved.entry
        buffer = entry.restored_buffer()
        is_loaded = buffer is None
        if buffer is None:
            if entry.load is not None and entry.was_written:
                self._loads.drop(entry, is_collected=True)
            if entry.load is None:
                self._loads.begin(entry, is_urgent=True)
            buffer = entry.tier.collect(entry.load)
            entry.remember(buffer)
        tensor = saved.view_of(buffer)
        saved.mark_read()
        if is_loaded:  # last: with something queued workers ask for the interpreter, at each operation on tensors here
            self._loads.read_ahead(entry)
        # A range with handles that wait is kept for them while the window has room: the next reader is often near.
        if entry.load is not None and (entry.num_unread == 0 or self._loads.is_full):
            self._loads.drop(entry, is_collected=True)
        return tensor

    def _reap(self) -> None:
        """Acts on the deaths of handles; entries without a handle go."""
        while self._dead:
            entry, was_read = self._dead.popleft()
            entry.num_handles -= 1
            entry.num_unread -= not was_read
            if entry in self._entries:
                if entry.num_handles == 0:
                    self._release(entry)
                elif entry.num_unread == 0 and entry.load is not None:
                    self._loads.drop(entry, is_collected=False)

    def _release(self, entry: Entry) -> None:
        if entry.load is not None:
            self._loads.drop(entry, is_collected=False)
        self._entries.remove(entry)
        if self._by_range.get(entry.key) is entry:
            del self._by_range[entry.key]
        members = self._groups[entry.group]
        del members[entry]
        if not members:
            del self._groups[entry.group]
        entry.tier.release(entry.parked)


@cache
def _hidden() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what packs and what unpacks, hidden from the compiler: made once, as each block asks in each step."""
    return unseen(ActivationOffload.pack), unseen(ActivationOffload.unpack)


def _num_bytes(tensor: Tensor) -> int:
    """Returns its bytes as if it were dense: a subclass or a sparse tensor may have no storage to ask."""
    return tensor.numel() * tensor.element_size()
