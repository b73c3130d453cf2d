"""The tensor heap: blocks that never overlap, pages that are counted right, a ceiling that holds, and real memory."""

import ctypes
import itertools
import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall.errors import UsageError
from memwall.predict.malloc import tensor_heap as subject
from memwall.predict.malloc.malloc_calls import StepEvents
from memwall.predict.malloc.malloc_process import ALLOCATE
from memwall.predict.malloc.tensor_heap import TensorHeap, dry_heap, heap_library, replay_in_heap

pytestmark = pytest.mark.skipif(heap_library() is None, reason="memwall was installed without its C library")

PAGE = mmap.PAGESIZE
MIB = 1 << 20

requests = st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE), st.integers(0, 1 << 30)), max_size=120)


def pages_of(nbytes: int) -> int:
    return -(-nbytes // PAGE)


class Model:
    """First fit over a dictionary of pages: slow, and plain enough to be believed."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.owner: dict[int, int] = {}
        self.resident: set[int] = set()
        self.blocks: dict[int, int] = {}
        self.fresh = self.peak_resident = 0

    def allocate(self, nbytes: int) -> int:
        count = pages_of(nbytes)
        begin = next(b for b in itertools.count() if not any(p in self.owner for p in range(b, b + count)))
        block = range(begin, begin + count)
        missing = [page for page in block if page not in self.resident]
        excess = len(self.resident) + len(missing) - self.ceiling if self.ceiling else 0
        free = sorted(self.resident - set(self.owner) - set(block), reverse=True)
        self.resident -= set(free[: max(excess, 0)])
        self.resident |= set(block)
        self.fresh += len(missing)
        self.peak_resident = max(self.peak_resident, len(self.resident))
        self.owner |= dict.fromkeys(block, begin)
        self.blocks[begin] = count
        return begin

    def free(self, begin: int) -> None:
        for page in range(begin, begin + self.blocks.pop(begin)):
            del self.owner[page]


@settings(max_examples=150)
@given(requests=requests, ceiling=st.sampled_from([0, 1, 30, 100, 100_000]))
def test_it_does_what_first_fit_over_pages_does(requests: list[tuple[bool, int, int]], ceiling: int) -> None:
    """GIVEN any order of requests WHEN heap and model serve them THEN addresses and figures are the same."""
    model = Model(ceiling)
    with dry_heap(ceiling * PAGE) as heap:
        base = 0
        live: list[int] = []
        for is_free, nbytes, pick in requests:
            if is_free and live:
                begin = live.pop(pick % len(live))
                model.free(begin)
                assert heap.free(base + begin * PAGE)
            else:
                begin = model.allocate(nbytes)
                address = heap.allocate(nbytes)
                assert address is not None
                base = base or address - begin * PAGE
                assert address == base + begin * PAGE
                live.append(begin)
            figures = heap.figures()
            assert figures.live_bytes == len(model.owner) * PAGE
            assert figures.resident_bytes == len(model.resident) * PAGE
            assert figures.fresh_bytes == model.fresh * PAGE
            assert figures.peak_resident_bytes == model.peak_resident * PAGE
            assert figures.num_blocks == len(live)


@given(requests=requests)
def test_a_ceiling_above_the_live_bytes_is_never_passed(requests: list[tuple[bool, int, int]]) -> None:
    """GIVEN a ceiling WHEN live bytes stay below it THEN resident bytes do."""
    with dry_heap(60 * PAGE) as heap:
        live: list[tuple[int, int]] = []
        for is_free, nbytes, pick in requests:
            if live and (is_free or sum(n for _, n in live) + pages_of(nbytes) > 60):
                heap.free(live.pop(pick % len(live))[0])
            elif pages_of(nbytes) <= 60 - sum(n for _, n in live):
                address = heap.allocate(nbytes)
                assert address is not None
                live.append((address, pages_of(nbytes)))
        assert heap.figures().peak_resident_bytes <= 60 * PAGE


def test_a_block_of_another_heap_is_left_alone() -> None:
    with dry_heap() as heap:
        address = heap.allocate(PAGE)
        assert address is not None
        assert not heap.free(address + PAGE)
        assert not heap.free(PAGE)
        assert heap.free(address)
        assert not heap.free(address)


def test_lowering_the_ceiling_returns_pages_at_once_and_trimming_all_of_them() -> None:
    with dry_heap() as heap:
        blocks = [heap.allocate(MIB) for _ in range(10)]
        for address in blocks[1:]:
            assert address is not None
            heap.free(address)
        assert heap.figures().resident_bytes == 10 * MIB
        heap.set_ceiling(4 * MIB)
        assert heap.figures().resident_bytes == 4 * MIB
        heap.trim()
        assert heap.figures().resident_bytes == MIB
        assert heap.figures().returned_bytes == 9 * MIB


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def test_real_pages_come_and_go_as_the_books_say() -> None:
    """GIVEN a heap with memory behind it WHEN blocks are written, freed and trimmed THEN the process follows."""
    library = heap_library()
    assert library is not None
    handle = library.heap_create(1 << 30, 0)
    heap = TensorHeap(library, handle)
    before = resident_bytes()
    blocks = [heap.allocate(MIB) for _ in range(200)]
    for number, address in enumerate(blocks):
        assert address is not None
        ctypes.memset(address, number % 251, MIB)
    assert resident_bytes() - before == pytest.approx(heap.figures().resident_bytes, rel=0.03)
    for address in blocks[::2]:
        assert address is not None
        heap.free(address)
    heap.set_ceiling(120 * MIB)
    assert resident_bytes() - before == pytest.approx(120 * MIB, rel=0.03)
    heap.trim()
    assert resident_bytes() - before == pytest.approx(100 * MIB, rel=0.03)
    for number, address in enumerate(blocks[1::2]):
        assert address is not None
        assert ctypes.string_at(address, MIB) == bytes([(2 * number + 1) % 251]) * MIB
    library.heap_destroy(handle)
    assert resident_bytes() - before < 4 * MIB


def test_a_reservation_that_is_used_up_gives_nothing() -> None:
    library = heap_library()
    assert library is not None
    handle = library.heap_create(10 * PAGE, 0)
    heap = TensorHeap(library, handle)
    first = heap.allocate(8 * PAGE)
    assert first is not None
    assert heap.allocate(3 * PAGE) is None
    assert heap.allocate(2 * PAGE) is not None
    library.heap_destroy(handle)


def test_a_step_that_repeats_faults_nothing_in_again_and_small_tensors_are_counted() -> None:
    out = StepEvents()
    small = [out.allocate(ALLOCATE, 1000) for _ in range(10)]
    large = [out.allocate(ALLOCATE, MIB) for _ in range(20)]
    out.free(large[::2])
    out.free([*small, *large[1::2], *(out.allocate(ALLOCATE, MIB) for _ in range(10))])
    found = replay_in_heap(out)
    assert found.peak_resident_bytes == 20 * MIB + 10_000
    assert found.fresh_bytes == 0


def test_under_a_ceiling_a_step_pays_in_faults_for_what_it_gives_back() -> None:
    out = StepEvents()
    narrow = [out.allocate(ALLOCATE, MIB) for _ in range(20)]
    out.free(narrow[::2])
    wide = [out.allocate(ALLOCATE, 2 * MIB) for _ in range(5)]
    out.free(wide + narrow[1::2])
    free, held = replay_in_heap(out), replay_in_heap(out, ceiling_bytes=20 * MIB)
    assert (free.peak_resident_bytes, free.fresh_bytes) == (30 * MIB, 0)
    assert held.peak_resident_bytes == 20 * MIB
    assert held.fresh_bytes == 20 * MIB


def test_without_the_library_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "heap_library", lambda: None)
    assert subject.heap_unavailable_reason() == (
        "memwall was installed without its C library; install a C compiler, then torch-memwall again"
    )
    with pytest.raises(UsageError, match="cannot replay a step in the tensor heap: memwall was installed without"):
        replay_in_heap(StepEvents())
