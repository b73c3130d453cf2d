"""Run the C libraries of an unpacked wheel: python .ci/check_native.py FOLDER

It needs Python and msgspec, but no torch, so that it can run under an emulator of another processor.
"""

import ctypes
import os
import platform
import sys
import zlib

sys.path.insert(0, sys.argv[1])

from memwall.predict.malloc.tensor_heap import TensorHeap, dry_heap, heap_library
from memwall.rows import native as rows_native
from memwall.store.checksum import crc32

MIB = 1 << 20


def check_heap() -> None:
    """A heap gives blocks, takes them back, and returns free pages before more would be resident than its ceiling."""
    library = heap_library()
    assert library is not None, "the tensor heap is not built"
    handle = library.heap_create(64 * MIB, 0)
    assert handle, "no address space for a heap of 64 MiB"
    heap = TensorHeap(library, handle)
    first, second = heap.allocate(8 * MIB), heap.allocate(8 * MIB)
    assert first is not None
    assert second is not None
    assert heap.contains(second)
    ctypes.memset(first, 1, 8 * MIB)
    ctypes.memset(second, 2, 8 * MIB)
    assert heap.free(first)
    assert not heap.free(first)
    heap.set_ceiling(12 * MIB)
    assert heap.figures().resident_bytes <= 12 * MIB
    assert ctypes.string_at(second, 8 * MIB) == b"\2" * (8 * MIB)
    library.heap_destroy(handle)
    with dry_heap() as books:
        assert books.allocate(1 << 33) is not None
        assert books.figures().live_bytes == 1 << 33


def check_checksum() -> None:
    """Its own instructions give what zlib gives, and where the processor has none zlib is asked."""
    data = bytearray(range(256)) * 4097
    for start in (0, 1, 15):
        assert crc32(memoryview(data)[start:]) == zlib.crc32(data[start:])


def check_rows() -> None:
    """Loops over rows, and swaps of their pages, can be loaded: every symbol that they need is there."""
    folder = rows_native.__path__[0]
    for name in ("rows", "pages"):
        ctypes.CDLL(f"{folder}/{name}.abi3.so", mode=os.RTLD_NOW)


check_heap()
check_checksum()
check_rows()
print(f"heap, checksum and rows run on {platform.machine()}, Python {platform.python_version()}")
