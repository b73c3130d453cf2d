"""Memory whose pages come and go while its address stays: what the system offers for that."""

import ctypes
import errno
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

from memwall.errors import StoreError

# With huge pages, in GB/s (2 cores, ext4 on a virtual disk, 24 tensors of 16 MiB): filled by copying 5.4 against 1.4,
# read from disk 1.5 against 1.0; given up in 1 ms against 128 ms.
_HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED, _PAGEOUT = 0x10, 21
_PAGEMAP = Path("/proc/self/pagemap")
# Of an entry there (Linux, admin-guide/mm/pagemap): in memory, swapped out, and of a file.
_ENTRY_BYTES, _IS_PRESENT, _IS_SWAPPED, _IS_OF_FILE = 8, 1 << 63, 1 << 62, 1 << 61


class PageMap:
    """Owns private memory that begins without pages, to be given pages and emptied again.

    Where it can hold a huge page it begins at the boundary of one: then `move_pages` moves huge pages whole from map to
    map. Between other addresses it would have to cut them up, and what is moved out of would never get huge ones again.

    Args:
        num_bytes: a multiple of the page size.
    """

    def __init__(self, num_bytes: int) -> None:
        has_huge_pages = num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        boundary_bytes = _HUGE_PAGE_BYTES if has_huge_pages else mmap.PAGESIZE
        self.num_bytes = num_bytes
        # Private: advice to drop the pages of a shared map would leave them in memory. The last page parts it from the
        # next map: no huge page may lie in both.
        self.memory = mmap.mmap(-1, num_bytes + boundary_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -start % boundary_bytes
        """Says where in `memory` it begins; what lies before it and after it stays without pages."""
        self.address = start + self.offset
        _maps[self.address] = self.memory
        self._has_huge_pages = has_huge_pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_NOHUGEPAGE, 0, len(self.memory))
        self._allow_huge_pages()

    def drop_pages(self) -> None:
        """Gives its memory back to the system; what it held is lost."""
        self.memory.madvise(mmap.MADV_DONTNEED, self.offset, self.num_bytes)

    def copy_of(self, source: "PageMap") -> None:
        """Takes the bytes of another map of the same size."""
        ctypes.memmove(self.address, source.address, self.num_bytes)

    def show(self, fd: int, offset: int) -> bool:
        """Has what a file holds from `offset` on: the system reads page by page, and takes pages back if it needs them.

        What is written there stays there, and does not reach the file.

        Returns:
            False where the system has no such maps, or does not tell what was written; then nothing has changed.
        """
        if sys.platform != "linux" or not _PAGEMAP.exists():
            return False
        return self._map(mmap.MAP_PRIVATE, fd, offset)

    def show_nothing(self) -> None:
        """Ends that: it is without pages, as at first.

        Raises:
            StoreError: the system refuses.
        """
        if not self._map(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0):
            raise StoreError(f"{self.num_bytes} bytes of memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self._allow_huge_pages()

    @property
    def own_bytes(self) -> int:
        """Counts what was written to since, of what shows a file."""
        own = (entry & _IS_SWAPPED or entry & (_IS_PRESENT | _IS_OF_FILE) == _IS_PRESENT for entry in self._entries())
        return mmap.PAGESIZE * sum(map(bool, own))

    @property
    def file_bytes(self) -> int:
        """Counts what is in memory as it was read, of what shows a file: the system can take that back."""
        whole = _IS_PRESENT | _IS_OF_FILE
        return mmap.PAGESIZE * sum(entry & whole == whole for entry in self._entries())

    def _allow_huge_pages(self) -> None:
        if self._has_huge_pages:
            self._advise(mmap.MADV_HUGEPAGE, self.offset, self.num_bytes)

    def _advise(self, advice: int, offset: int, num_bytes: int) -> None:
        try:
            self.memory.madvise(advice, offset, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages, as for real time
                raise

    def _map(self, flags: int, fd: int, offset: int) -> bool:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = _libc.mmap(self.address, self.num_bytes, access, flags | _MAP_FIXED, fd, offset)
        return bool(found != _FAILED)

    def _entries(self) -> Iterator[int]:
        return _entries(self.address, self.num_bytes)


_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Holds the memory of every `PageMap` by where it begins, for as long as somebody has it."""


def is_only_for_tensors(address: int) -> bool:
    """Returns whether nothing but tensors can show memory that torch did not allocate, as an array of numpy would.

    It is that of a `PageMap`, still there itself or not, or of a file that somebody has mapped.
    """
    if address in _maps:
        return True
    for line in Path("/proc/self/maps").read_text().splitlines() if _PAGEMAP.exists() else ():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            return inode != "0"
    return False


def return_file_pages(address: int, num_bytes: int) -> None:
    """Tells the system that memory is not needed any more, where it is of a file that somebody has mapped.

    Advice (Linux 5.4): nothing is lost, and what is used after all is read again.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0 and _PAGEMAP.exists() and any(entry & _IS_OF_FILE for entry in _entries(start, size)):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _PAGEOUT)


def _entries(address: int, num_bytes: int) -> Iterator[int]:
    with open(_PAGEMAP, "rb", buffering=0) as table:
        table.seek(address // mmap.PAGESIZE * _ENTRY_BYTES)
        entries = table.read(num_bytes // mmap.PAGESIZE * _ENTRY_BYTES)
    return (entry for (entry,) in struct.iter_unpack("=Q", entries))


def has_pages(pages: PageMap) -> bool:
    """Returns whether anything in a map that was emptied has been touched since: each touch brings a page of zeros."""
    found = ctypes.create_string_buffer(-(-pages.num_bytes // mmap.PAGESIZE))
    failed = _libc.mincore(pages.address, pages.num_bytes, found)
    return not failed and found.raw.strip(b"\0") != b""


def move_pages(source: PageMap, target: PageMap) -> None:
    """Moves what a map holds to an empty one of the same size, or one that shows a file.

    By page tables where the system can (Linux 5.7); then nobody who looks at it sees a gap.

    Raises:
        StoreError: the system refuses.
    """
    if hasattr(_libc, "mremap"):
        _libc.mremap.restype = ctypes.c_void_p
        start, place = ctypes.c_void_p(source.address), ctypes.c_void_p(target.address)
        size, flags = ctypes.c_size_t(source.num_bytes), ctypes.c_int(_MAYMOVE | _FIXED | _DONTUNMAP)
        if _libc.mremap(start, size, size, flags, place) != _FAILED:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise StoreError(
                f"{source.num_bytes} bytes that came from disk cannot be put in their place: {os.strerror(number)} "
                f"(errno {number}); look at the limits of this process's memory (ulimit -v, vm.max_map_count)"
            )
    target.show_nothing()
    target.copy_of(source)
    source.drop_pages()
