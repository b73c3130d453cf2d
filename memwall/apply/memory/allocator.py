"""Where CPU tensors' memory comes from and goes to: a heap of their own, or malloc."""

import ctypes
import errno
import logging
import os

import psutil
import torch

from memwall.errors import ApplyError, UsageError
from memwall.machine.meter import process_bytes, process_peak_bytes, return_free_memory
from memwall.patches import Patches
from memwall.predict.malloc.tensor_heap import (
    MIN_TENSOR_BYTES,
    TORCH_LIBRARY,
    TensorHeap,
    heap_library,
    heap_unavailable_reason,
)
from memwall.predict.process import TENSOR_HEAP

_log = logging.getLogger(__name__)

_LEAST_RESERVED_BYTES = 1 << 30
# Another thread may free a block between two looks, and what was returned may never have been written.
_NUM_LOOKS = 8
_RISE_BYTES = 4 << 20
"""Rise of what tensors hold when a step begins from which on what malloc has free is returned."""


def hooked_heap() -> TensorHeap:
    """Returns the process's tensor heap; torch's large CPU tensors go there from now on.

    Raises:
        ApplyError: there is no such heap here.
    """
    reason = heap_unavailable_reason()
    library = heap_library()
    if reason or library is None:
        raise ApplyError(f"cannot give tensors a heap of their own: {reason}")
    # Addresses are cheap, and tensors come and go: four times the memory there is leaves room for any order.
    reserved_bytes = min(4 * psutil.virtual_memory().total, 1 << 40)
    error = ctypes.c_int()
    handle = None
    while not handle and reserved_bytes >= _LEAST_RESERVED_BYTES:
        handle = library.heap_hook(TORCH_LIBRARY, reserved_bytes, MIN_TENSOR_BYTES, ctypes.byref(error))
        if not handle and error.value != errno.ENOMEM:
            break
        reserved_bytes //= 2  # under ulimit -v there may be less; what does not fit goes to malloc
    if not handle:
        name = errno.errorcode.get(error.value, str(error.value))
        raise ApplyError(
            f"cannot give tensors a heap of their own: {os.strerror(error.value)} ({name}); "
            "see whether the address space is limited (ulimit -v)"
        )
    return TensorHeap(library, handle)


class AllocatorHandler:
    """Has tensors in the process's heap, from `apply` to `undo`.

    `undo` sends new tensors to malloc again; those in the heap stay there until they are freed, and its free pages go
    back to the system.
    """

    def __init__(self) -> None:
        self.policy: str | None = None
        """Names what is in force; None for malloc."""
        self._heap: TensorHeap | None = None
        self._limit_bytes = self._outside_bytes = self._others_bytes = self._peak_before_bytes = 0
        self._most_outside_bytes = self._most_begun_bytes = 0
        self._patches = Patches("has CPU tensors allocated in another way")

    def apply(self, policy: str, limit_bytes: int = 0, outside_bytes: int = 0) -> None:
        """Sets a way of reuse, or another limit for it. To be called between steps.

        Args:
            policy: "tensor-heap"; there is no other.
            limit_bytes: process bytes from which on the tensor heap returns free pages before it takes new ones.
            outside_bytes: of these, what each step needs outside the heap and gives back.

        Raises:
            ApplyError: it cannot be had in this process; then malloc is in force.
            UsageError: there is none of that name.
        """
        if policy != TENSOR_HEAP:
            raise UsageError(f"'{policy}' is no allocator policy; expected {TENSOR_HEAP}: make the plan again")
        if self._heap is None:
            self._heap = _own_heap(self)
            self._patches.add("native function", f"malloc's in {TORCH_LIBRARY.decode()}", _release_heap)
        self._limit_bytes, self._outside_bytes = limit_bytes, outside_bytes
        self._others_bytes = self._present_others_bytes()
        self._peak_before_bytes, self._most_outside_bytes = self._heap.figures().peak_resident_bytes, 0
        self._most_begun_bytes = self.live_bytes
        self.hold_limit()
        self.policy = policy
        _log.debug("tensors are allocated under '%s'", policy)

    def apply_tight(self, limit_bytes: int = 0, outside_bytes: int = 0) -> None:
        """Sets the way with the least memory, see `apply`; nothing where there is none."""
        if not heap_unavailable_reason():
            self.apply(TENSOR_HEAP, limit_bytes, outside_bytes)

    def begin_step(self) -> None:
        """Holds the heap to its limit in the step that begins.

        Where the loop has put new tensors in the place of old ones since, as an average of the weights, malloc may keep
        the old ones' memory, which they had before there was a heap: it goes back to the system first.
        """
        if self._heap is None:
            return
        if self._limit_bytes and self.live_bytes > self._most_begun_bytes + _RISE_BYTES:
            self._most_begun_bytes = self.live_bytes
            return_free_memory(generation=0)
        self.hold_limit()

    def hold_limit(self, room_bytes: int = 0) -> None:
        """Holds the heap to its limit anew, before each step at least: what else the process holds may have changed.

        Args:
            room_bytes: what is to be left free below the limit where free pages can be returned for it.
        """
        if self._heap is not None:
            ceiling_bytes = 0
            if self._limit_bytes:
                ceiling_bytes = max(self._limit_bytes - self._most_others_bytes() - room_bytes, 1)
            self._heap.set_ceiling(ceiling_bytes)

    def room_bytes(self) -> int | None:
        """Returns the bytes that tensors may still take below the limit; None where nothing is held to one."""
        if self._heap is None or not self._limit_bytes:
            return None
        return self._limit_bytes - self._most_others_bytes() - self._heap.figures().live_bytes

    @property
    def is_limited(self) -> bool:
        """Says whether tensors have a heap that is held to a limit."""
        return self._heap is not None and self._limit_bytes > 0

    @property
    def others_bytes(self) -> int:
        """Counts what the process holds beside the heap now, which there is."""
        return self._present_others_bytes()

    @property
    def live_bytes(self) -> int:
        """Counts the bytes of tensors in the heap; 0 where there is none."""
        return 0 if self._heap is None else self._heap.figures().live_bytes

    def leave_room(self, num_bytes: int) -> None:
        """Returns free pages after a step until so many bytes are free below the limit, for what is made elsewhere.

        The heap takes a block's pages to be resident, whether they were written or not; so the process is looked at
        after each return, until there is room or nothing more to return.
        """
        if self._heap is None or not self._limit_bytes:
            return
        for _ in range(_NUM_LOOKS):
            before_bytes = self._heap.figures().resident_bytes
            self._heap.set_ceiling(max(self._limit_bytes - num_bytes - self._present_others_bytes(), 1))
            if self._heap.figures().resident_bytes == before_bytes:
                return

    def kept_bytes(self) -> int | None:
        """Returns the bytes of free pages in the heap at its peak since its limit was set; None where that is older.

        At least so many: its blocks may have been largest at another moment.
        """
        if self._heap is None:
            return None
        figures = self._heap.figures()
        is_new = figures.peak_resident_bytes > self._peak_before_bytes
        return max(0, figures.peak_resident_bytes - figures.peak_live_bytes) if is_new else None

    def look_outside(self) -> None:
        """Notes what the process holds outside the heap, now and when it held most: a step is looked at many times.

        What an operator's library took and gave back since the last look shows in the process's peak alone. The heap
        had at most its own peak of that.
        """
        if self._heap is not None:
            now_bytes, peak_bytes, figures = process_bytes(), process_peak_bytes(), self._heap.figures()
            seen_bytes = max(now_bytes - figures.resident_bytes, peak_bytes - figures.peak_resident_bytes)
            self._most_outside_bytes = max(self._most_outside_bytes, seen_bytes)

    def passing_outside_bytes(self) -> int | None:
        """Returns the most that was seen outside the heap since its limit was set, without what is held there now.

        What was there before and has gone since, as weights that a loop replaces by new ones, did not pass either. None
        where there is no heap.
        """
        if self._heap is None:
            return None
        return max(0, self._most_outside_bytes - max(self._others_bytes, self._present_others_bytes()))

    def _most_others_bytes(self) -> int:
        # What a step will need outside may be resident already: scratch that a library keeps.
        return max(self._present_others_bytes(), self._others_bytes + self._outside_bytes)

    def _present_others_bytes(self) -> int:
        assert self._heap is not None
        return process_bytes() - self._heap.figures().resident_bytes

    def owns_pages(self, address: int) -> bool:
        """Returns whether a tensor that begins there lies in the heap: on pages of its own, which stay mapped."""
        return self._heap is not None and self._heap.contains(address)

    def takes_tensors(self) -> bool:
        """Returns whether a tensor made now lies in the heap."""
        heap = self._heap
        for _ in range(_NUM_LOOKS if heap is not None else 0):
            assert heap is not None
            before = heap.figures().num_blocks
            probe = torch.empty(MIN_TENSOR_BYTES, dtype=torch.uint8)
            if heap.figures().num_blocks > before:
                return True
            del probe
        return False

    def trim(self, *, generation: int = 2) -> None:
        """Returns all free memory to the system, so that what is resident is in use.

        Args:
            generation: see `return_free_memory`.
        """
        return_free_memory(generation=generation)
        if self._heap is not None:  # last: cycles that were collected may have held tensors
            self._heap.trim()

    def make_room(self, *, is_first: bool) -> None:
        """Returns free memory between steps, before something runs that is no step and may need memory elsewhere.

        Args:
            is_first: whether nothing ran since the last step, so that its free memory is still here.
        """
        if self.policy is not None:
            if is_first:
                self.trim(generation=1)
            self.hold_limit()

    def undo(self) -> None:
        """Takes it back, as far as that goes."""
        self._heap = self.policy = None
        self._patches.undo()


_owners: list[AllocatorHandler] = []
"""Who steers the process's one heap: at most one."""


def _own_heap(handler: AllocatorHandler) -> TensorHeap:
    if _owners:
        raise ApplyError(
            "another memwall session is open in this process, and both would hold its memory to a limit; close that "
            "one first (it is a context manager)"
        )
    heap = hooked_heap()
    _owners.append(handler)
    return heap


def _release_heap() -> None:
    library = heap_library()
    assert library is not None
    library.heap_unhook()
    _owners.clear()
