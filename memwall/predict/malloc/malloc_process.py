"""The process that replays a sequence of allocations against this machine's malloc, without touching the memory.

`malloc_replay` starts this file as `python -S -s -P`: a fresh heap, no torch, and the C library that the training
process would use. It first makes the calls and notes the addresses, and only then works out which
pages were resident, so that its own bookkeeping allocates nothing between two replayed calls.

Standard input: one line of JSON (`num_events`), then `num_events` triples of
native int64 (kind, slot, nbytes). Standard output: one line of JSON, a list with one object per replayed step.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

ALLOCATE = 0
"""A tensor's block, aligned as torch's CPU allocator aligns it; all of it will be written."""
ALLOCATE_SMALL = 1
"""A block from plain malloc: graph nodes, tensor headers."""
FREE = 2
STEP = 3
"""A new step begins: figures are kept per step."""
MOVE = 4
"""The block of the slot in the third number is now known by the slot in the second."""

# c10/core/alignment.h: gAlignment.
_TORCH_ALIGNMENT_BYTES = 64
# malloc/malloc.c: the word before a chunk's memory holds its size and, in bit 1, whether it has its own mapping.
_SIZE_WORD_BYTES = 8
_CHUNK_HEADER_BYTES = 16
_IS_MMAPPED = 2


def _perform(events: Sequence[int]) -> tuple[array[int], array[int], array[int]]:
    """Makes the calls; per event: the address (0 if none), whether it has a mapping of its own, the heap's end."""
    libc = ctypes.CDLL(None)
    memalign, malloc, free, sbrk = libc.memalign, libc.malloc, libc.free, libc.sbrk
    memalign.argtypes, memalign.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
    malloc.argtypes, malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    sbrk.argtypes, sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_void_p
    read_size_word = ctypes.c_size_t.from_address
    num_events = len(events) // 3
    addresses, mapped, heap_ends = (array("q", bytes(8 * num_events)) for _ in range(3))
    slots = array("q", bytes(8 * (1 + max(islice(events, 1, None, 3), default=0))))
    position = 0
    for index in range(num_events):
        kind = events[position]
        if kind == FREE:
            free(slots[events[position + 1]])
        elif kind <= ALLOCATE_SMALL:
            nbytes = events[position + 2]
            address = memalign(_TORCH_ALIGNMENT_BYTES, nbytes) if kind == ALLOCATE else malloc(nbytes)
            if not address:
                raise MemoryError(f"event {index}: malloc refused to reserve {nbytes} bytes of address space")
            slots[events[position + 1]] = addresses[index] = address
            mapped[index] = read_size_word(address - _SIZE_WORD_BYTES).value & _IS_MMAPPED
        elif kind == MOVE:
            slots[events[position + 1]] = slots[events[position + 2]]
        heap_ends[index] = sbrk(0)
        position += 3
    return addresses, mapped, heap_ends


def resident_pages(
    events: Sequence[int],
    addresses: Sequence[int],
    mapped: Sequence[int],
    heap_ends: Sequence[int],
    page_bytes: int,
) -> list[dict[str, int]]:
    """Returns the resident peak and the bytes resident anew per step, from the addresses that malloc gave.

    A page becomes resident when a tensor that is written lies on it. A freed block of the heap leaves its pages
    resident; a block with its own mapping takes them along; a heap that shrinks loses those beyond its end.

    Args:
        events: (kind, slot, nbytes) per event, flat.
        addresses, mapped, heap_ends: per event: address given, whether it is a mapping of its own, the heap's end.
        page_bytes: size of a page.
    """
    # Without a list of them, nor copies of the events below: what this process holds is the training's as well.
    first_address = min(_in_heap(addresses, mapped), default=0)
    first_page = (first_address - _CHUNK_HEADER_BYTES) // page_bytes
    end_page = max((max(heap_ends, default=0), max(_in_heap(addresses, mapped), default=0))) // page_bytes + 2
    is_resident = bytearray(end_page - first_page if first_address else 0)
    heap_pages = mapped_pages = 0
    heap_end = heap_ends[0] if len(heap_ends) else 0
    live: dict[int, tuple[int, int, int]] = {}
    steps: list[dict[str, int]] = []
    figures: dict[str, int] = {}
    kinds, slots, sizes = (islice(events, place, None, 3) for place in range(3))
    for index, (kind, slot, nbytes) in enumerate(zip(kinds, slots, sizes, strict=True)):
        if kind <= ALLOCATE_SMALL:
            address = addresses[index]
            low = (address - _CHUNK_HEADER_BYTES) // page_bytes - first_page
            high = (address + nbytes - 1) // page_bytes + 1 - first_page
            if mapped[index]:
                fresh = high - low
                mapped_pages += fresh
            else:
                if high > len(is_resident):
                    # brk was refused, and malloc went on in mappings that it treats as heap.
                    is_resident.extend(bytes(high - len(is_resident)))
                fresh = high - low - is_resident.count(1, low, high)
                if fresh:
                    is_resident[low:high] = b"\1" * (high - low)
                    heap_pages += fresh
            live[slot] = (low, high, mapped[index])
            if figures:
                figures["fresh_bytes"] += fresh * page_bytes
                resident = (heap_pages + mapped_pages) * page_bytes
                figures["peak_resident_bytes"] = max(figures["peak_resident_bytes"], resident)
        elif kind == FREE:
            low, high, own = live.pop(slot)
            mapped_pages -= high - low if own else 0
        elif kind == MOVE:
            live[slot] = live.pop(nbytes)
        elif kind == STEP:
            resident = (heap_pages + mapped_pages) * page_bytes
            figures = {"peak_resident_bytes": resident, "fresh_bytes": 0}
            steps.append(figures)
        if heap_ends[index] < heap_end:
            beyond = max(0, -(-heap_ends[index] // page_bytes) - first_page)
            lost = is_resident.count(1, beyond)
            if lost:
                is_resident[beyond:] = bytes(len(is_resident) - beyond)
                heap_pages -= lost
        heap_end = heap_ends[index]
    return steps


def _in_heap(addresses: Sequence[int], mapped: Sequence[int]) -> Iterator[int]:
    """Yields the addresses of blocks without a mapping of their own."""
    return (address for address, own in zip(addresses, mapped, strict=True) if address and not own)


def _main() -> int:
    request = json.loads(sys.stdin.buffer.readline())
    events = array("q")
    events.frombytes(sys.stdin.buffer.read(24 * request["num_events"]))
    try:
        addresses, mapped, heap_ends = _perform(events)
    except (MemoryError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    steps = resident_pages(events, addresses, mapped, heap_ends, os.sysconf("SC_PAGE_SIZE"))
    sys.stdout.write(json.dumps(steps) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
