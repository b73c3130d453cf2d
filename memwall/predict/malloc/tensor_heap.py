"""The tensor heap, asked without memory behind it: what a step would keep resident in it.

A dry heap runs the very code that will serve the training run (`memwall/native/tensor_heap.c`) and only keeps books, so
the forecast and the run agree by construction. Sending torch's allocations to it is `memwall.apply.memory.allocator`.
"""

import ctypes
import functools
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from memwall.errors import UsageError
from memwall.native import load_library
from memwall.predict.malloc.malloc_calls import StepEvents, repeated
from memwall.predict.malloc.malloc_process import ALLOCATE, ALLOCATE_SMALL, FREE, MOVE, STEP

MIN_TENSOR_BYTES = 64 << 10
"""Smaller tensors stay with malloc: rounding them to pages would cost more than it saves."""
TORCH_LIBRARY = b"libc10.so"
"""Where torch allocates the data of CPU tensors (c10/core/impl/alloc_cpu.cpp)."""
# What a first fit may spread over beyond what is live at once.
_SPREAD = 4
_PROBED_BYTES = 1 << 30


class HeapFigures(Struct, frozen=True, kw_only=True):
    """Says what a heap holds, in the order of the library's record."""

    live_bytes: int
    """Bytes in blocks, rounded to pages."""
    resident_bytes: int
    """Live bytes, and free ones that were not returned to the system."""
    peak_live_bytes: int
    peak_resident_bytes: int
    fresh_bytes: int
    """Bytes that blocks made resident, since the heap was made: each page is a fault."""
    returned_bytes: int
    num_blocks: int


class _Figures(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in HeapFigures.__struct_fields__)


class HeapForecast(Struct, frozen=True, kw_only=True):
    """Says what steps need in a heap that carries over from each to the next."""

    peak_resident_bytes: int
    """Highest over all steps; tensors below `MIN_TENSOR_BYTES`, which malloc holds, included."""
    fresh_bytes: int
    """Bytes made resident in the last step: what every further one costs in page faults."""
    small_bytes: int
    """The most that tensors below `MIN_TENSOR_BYTES` hold at once."""


class TensorHeap:
    """Speaks to one heap of the library. Its methods are safe to call from several threads.

    Args:
        library: as `heap_library` gives it.
        handle: address of the heap.
    """

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle

    def allocate(self, nbytes: int) -> int | None:
        """Returns the address of a new block, aligned to a page; None when the reserved address space is used up."""
        address: int | None = self._library.heap_allocate(self._handle, nbytes)
        return address

    def free(self, address: int) -> bool:
        """Ends a block; False if this heap has none there."""
        return bool(self._library.heap_free(self._handle, address) == 0)

    def contains(self, address: int) -> bool:
        """Tells whether an address lies in the range that this heap's blocks are taken from."""
        return bool(self._library.heap_contains(self._handle, address))

    def set_ceiling(self, ceiling_bytes: int) -> None:
        """Has free pages returned from now on before more would be resident; 0 for no ceiling."""
        self._library.heap_set_ceiling(self._handle, ceiling_bytes)

    def trim(self) -> None:
        """Returns every free page to the system."""
        self._library.heap_trim(self._handle)

    def figures(self) -> HeapFigures:
        """Returns what the heap holds now."""
        found = _Figures()
        self._library.heap_figures(self._handle, ctypes.byref(found))
        return HeapFigures(**{name: getattr(found, name) for name, *_ in _Figures._fields_})


@functools.cache
def heap_library() -> ctypes.CDLL | None:
    """Returns the library with its signatures declared; None where the installation built none."""
    handle, nbytes = ctypes.c_void_p, ctypes.c_uint64
    signatures = {
        "heap_create": (handle, (nbytes, ctypes.c_int)),
        "heap_destroy": (None, (handle,)),
        "heap_allocate": (handle, (handle, nbytes)),
        "heap_contains": (ctypes.c_int, (handle, ctypes.c_void_p)),
        "heap_free": (ctypes.c_int, (handle, ctypes.c_void_p)),
        "heap_set_ceiling": (None, (handle, nbytes)),
        "heap_trim": (None, (handle,)),
        "heap_figures": (None, (handle, ctypes.POINTER(_Figures))),
        "heap_can_hook": (ctypes.c_int, (ctypes.c_char_p,)),
        "heap_hook": (handle, (ctypes.c_char_p, nbytes, nbytes, ctypes.POINTER(ctypes.c_int))),
        "heap_unhook": (None, ()),
    }
    return load_library("tensor_heap", signatures)


def heap_unavailable_reason() -> str:
    """Says why torch's tensors cannot live in a tensor heap here; "" if they can."""
    if sys.platform != "linux":
        return f"the tensor heap needs Linux; this is {sys.platform}"
    library = heap_library()
    if library is None:
        return "memwall was installed without its C library; install a C compiler, then torch-memwall again"
    import torch  # noqa: F401 -- loads the library that is looked at

    probe = library.heap_create(_PROBED_BYTES, 0)
    if not probe:
        return "address space is limited (ulimit -v, vm.overcommit_memory)"
    library.heap_destroy(probe)
    if not library.heap_can_hook(TORCH_LIBRARY):
        return (
            f"this torch does not allocate as expected ({platform.machine()}, {TORCH_LIBRARY.decode()} is not loaded "
            "or has no slot for posix_memalign)"
        )
    return ""


@contextmanager
def dry_heap(ceiling_bytes: int = 0, *, reserved_bytes: int = 1 << 36) -> Iterator[TensorHeap]:
    """Makes a heap that only keeps books: address space of 0.2 % of what it reserves.

    Raises:
        UsageError: there is no library, or no address space.
    """
    library = heap_library()
    handle = library and library.heap_create(reserved_bytes, 1)
    if not library or not handle:
        raise UsageError(
            "cannot replay a step in the tensor heap: "
            + (heap_unavailable_reason() or f"no address space for the books of {reserved_bytes} bytes")
        )
    try:
        heap = TensorHeap(library, handle)
        heap.set_ceiling(ceiling_bytes)
        yield heap
    finally:
        library.heap_destroy(handle)


def replay_in_heap(step: StepEvents, ceiling_bytes: int = 0, *, num_steps: int = 3) -> HeapForecast:
    """Replays the tensors of a step in a dry heap, several times over.

    Args:
        step: as `malloc_calls.events_of` makes it, small blocks left out.
        ceiling_bytes: resident bytes above which free pages are returned; 0 for none.

    Raises:
        UsageError: see `dry_heap`.
    """
    events = repeated(step, num_steps)
    calls = list(zip(events[::3], events[1::3], events[2::3], strict=True))
    large_bytes, small_bytes = _peak_bytes(calls)
    addresses: dict[int, int | None] = {}
    fresh_before = 0
    ceiling_bytes = max(ceiling_bytes - small_bytes, 1) if ceiling_bytes else 0
    with dry_heap(ceiling_bytes, reserved_bytes=_SPREAD * large_bytes + _PROBED_BYTES) as heap:
        for kind, slot, nbytes in calls:
            if kind in (ALLOCATE, ALLOCATE_SMALL):
                addresses[slot] = heap.allocate(nbytes) if nbytes >= MIN_TENSOR_BYTES else None
                if addresses[slot] is None and nbytes >= MIN_TENSOR_BYTES:
                    raise UsageError(f"the step spreads over more than {_SPREAD} times the bytes that it needs at once")
            elif kind == FREE:
                address = addresses.pop(slot)
                if address is not None:
                    heap.free(address)
            elif kind == MOVE:
                addresses[slot] = addresses.pop(nbytes)
            elif kind == STEP:
                fresh_before = heap.figures().fresh_bytes
        figures = heap.figures()
    return HeapForecast(
        peak_resident_bytes=figures.peak_resident_bytes + small_bytes,
        fresh_bytes=figures.fresh_bytes - fresh_before,
        small_bytes=small_bytes,
    )


def _peak_bytes(calls: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Returns the most bytes that tensors in the heap hold at once, and the most that those outside do."""
    sizes: dict[int, int] = {}
    live, peak = [0, 0], [0, 0]
    for kind, slot, nbytes in calls:
        if kind in (ALLOCATE, ALLOCATE_SMALL):
            sizes[slot] = nbytes
            is_small = nbytes < MIN_TENSOR_BYTES
            live[is_small] += nbytes
            peak[is_small] = max(peak[is_small], live[is_small])
        elif kind == FREE:
            nbytes = sizes.pop(slot)
            live[nbytes < MIN_TENSOR_BYTES] -= nbytes
        elif kind == MOVE:
            sizes[slot] = sizes.pop(nbytes)
    return peak[0], peak[1]
