"""The tensor heap's memory comes in huge pages, and no byte of it comes or stays that its books do not have."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cgroup import CapUnavailable, memory_cap
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall.predict.malloc.tensor_heap import TensorHeap, heap_library

pytestmark = pytest.mark.skipif(heap_library() is None, reason="memwall was installed without its C library")

PAGE = mmap.PAGESIZE
MIB = 1 << 20
HUGE = 2 * MIB
RESERVED = 256 * MIB
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this kernel gives no huge pages"
)


@contextmanager
def real_heap() -> Iterator[TensorHeap]:
    library = heap_library()
    assert library is not None
    handle = library.heap_create(RESERVED, 0)
    try:
        yield TensorHeap(library, handle)
    finally:
        library.heap_destroy(handle)


def written(heap: TensorHeap, nbytes: int) -> int:
    """A block every byte of which is in use."""
    address = heap.allocate(nbytes)
    assert address is not None
    ctypes.memset(address, 1, nbytes)
    return address


def mapped_bytes(base: int) -> int:
    """Returns the pages that the kernel has mapped of the heap that begins at `base`: bit 63 of each page's entry."""
    entries = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        found = np.frombuffer(os.pread(entries, RESERVED // PAGE * 8, base // PAGE * 8), dtype=np.uint64)
    finally:
        os.close(entries)
    return int((found >> 63).sum()) * PAGE


def huge_bytes(base: int) -> int:
    """Returns what the kernel has mapped of that heap in huge pages."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin = int(name.partition("-")[0], 16)
            is_inside = base <= begin < base + RESERVED
        elif is_inside and name == "AnonHugePages:":
            total += int(rest[0]) << 10
    return total


sizes = st.one_of(st.integers(1, 6 * MIB), st.sampled_from([HUGE, 2 * HUGE, HUGE - PAGE, HUGE + PAGE]))
requests = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes),
        st.tuples(st.just("free"), st.integers(0, 1 << 20)),
        st.tuples(st.just("ceiling"), st.integers(1, 40 * MIB)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(requests=requests)
def test_the_kernel_maps_what_the_books_have_and_less_than_a_huge_page_more(requests: list[tuple[str, int]]) -> None:
    """GIVEN any requests WHEN every block is written THEN its bytes stay, and the kernel's count is the heap's."""
    with real_heap() as heap:
        base = written(heap, PAGE)
        assert base % HUGE == 0
        live = [(base, PAGE, 1)]
        for number, (kind, value) in enumerate(requests, 2):
            if kind == "allocate" and sum(nbytes for _, nbytes, _ in live) + value < RESERVED // 4:
                address = heap.allocate(value)
                assert address is not None
                ctypes.memset(address, number, value)
                live.append((address, value, number))
            elif kind == "free" and len(live) > 1:
                heap.free(live.pop(1 + value % (len(live) - 1))[0])
            elif kind == "ceiling":
                heap.set_ceiling(value)
            elif kind == "trim":
                heap.trim()
            ahead_bytes = mapped_bytes(base) - heap.figures().resident_bytes
            assert 0 <= ahead_bytes < HUGE
        for address, nbytes, number in live:
            assert ctypes.string_at(address, nbytes) == bytes([number]) * nbytes


@needs_huge_pages
def test_blocks_lie_in_huge_pages_and_do_again_after_all_was_returned() -> None:
    with real_heap() as heap:
        base = written(heap, PAGE)
        for _ in range(3):
            blocks = [written(heap, 3 * MIB) for _ in range(16)]
            assert huge_bytes(base) >= 48 * MIB
            for address in blocks:
                heap.free(address)
            heap.trim()
            assert mapped_bytes(base) == PAGE


@needs_huge_pages
def test_a_block_that_covers_returned_huge_pages_has_them_again() -> None:
    """GIVEN a returned hole between two blocks WHEN a block fills it THEN what it covers whole is huge."""
    with real_heap() as heap:
        first, hole, _ = written(heap, HUGE), written(heap, 8 * MIB), written(heap, HUGE)
        heap.free(hole)
        heap.trim()
        assert huge_bytes(first) == 2 * HUGE
        assert written(heap, 7 * MIB) == hole
        assert huge_bytes(first) == 2 * HUGE + 6 * MIB


def num_areas(base: int, reserved_bytes: int) -> int:
    """Areas of address space that the kernel tells apart in a heap."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(base <= int(line.partition("-")[0], 16) < base + reserved_bytes for line in lines)


@needs_huge_pages
def test_gaps_do_not_use_up_the_areas_that_a_process_may_have() -> None:
    """GIVEN so many gaps that a kernel's limit would be near WHEN there are more THEN all comes page by page."""
    library = heap_library()
    assert library is not None
    reserved_bytes = 1 << 36
    handle = library.heap_create(reserved_bytes, 0)
    heap = TensorHeap(library, handle)
    blocks = [heap.allocate(HUGE) for _ in range(18_000)]  # nothing is in them: no memory is taken
    assert blocks[0] is not None
    try:
        for address in blocks[:1000:2]:
            assert address is not None
            heap.free(address)
        heap.trim()
        assert 900 < num_areas(blocks[0], reserved_bytes) < 1100
        for address in blocks[1000::2]:
            assert address is not None
            heap.free(address)
        heap.trim()
        assert num_areas(blocks[0], reserved_bytes) < 10
        ctypes.memset(blocks[1], 1, HUGE)
        assert heap.allocate(HUGE) == blocks[0]
    finally:
        library.heap_destroy(handle)


_HALF_RETURNED = """
import ctypes, mmap, sys
from memwall.predict.malloc.tensor_heap import TensorHeap, heap_library
library = heap_library()
heap = TensorHeap(library, library.heap_create(1 << 30, 0))
blocks = [heap.allocate(3 << 20) for _ in range(60)]
for address in blocks:
    ctypes.memset(address, 1, 3 << 20)
for address in blocks[::2]:
    heap.free(address)
heap.trim()
other = mmap.mmap(-1, max(mmap.PAGESIZE, int(sys.argv[1])))
ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(other)), 1, len(other))
"""


@pytest.mark.slow
@pytest.mark.cgroup
@needs_huge_pages
def test_parts_of_huge_pages_that_are_returned_are_there_for_others_at_once() -> None:
    """GIVEN every other of 60 blocks of 3 MiB returned WHEN 85 of those 90 MiB are used THEN the group needs no more.

    Of huge pages that are mapped in part, the kernel frees nothing until memory is short, and counts all of them.
    """
    peaks = []
    for other_bytes in (0, 85 * MIB):
        try:
            with memory_cap(None) as cap:
                done = cap.run([sys.executable, "-c", _HALF_RETURNED, str(other_bytes)], timeout_s=60)
        except CapUnavailable as reason:
            pytest.skip(f"no memory group can be made here: {reason}")
        assert done.status == 0, done.errors
        peaks.append(done.peak_bytes)
    assert peaks[0] > 180 * MIB
    assert peaks[1] == pytest.approx(peaks[0], abs=8 * MIB)
