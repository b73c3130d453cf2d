"""Where torch's tensors live once a plan says so; each case in a process of its own."""

from collections.abc import Callable

import pytest
from warm_python import warm_python

from memwall.predict.malloc.tensor_heap import heap_unavailable_reason

pytestmark = pytest.mark.slow

needs_heap = pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())

_PRELUDE = """
import ctypes, os, threading
import torch
from memwall.apply.memory.allocator import AllocatorHandler, hooked_heap
from memwall.errors import ApplyError
from memwall.machine.meter import process_bytes
MIB = 1 << 20
torch.set_num_threads(1)  # a forked child cannot use its parent's
# Without the heap tensors of these tests lie in malloc's, gaps and all.
ctypes.CDLL(None).mallopt(-3, 32 * MIB)
def tensor(mib):
    return torch.full((int(mib * MIB) // 4,), 1.0)
tensor(1).sum()  # the code itself becomes resident
handler = AllocatorHandler()
"""


OutputOf = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def output_of() -> OutputOf:
    """Returns what a script prints after the prelude, in a process whose memory no other script has used."""
    return lambda script: warm_python().printed_by(_PRELUDE + script)


@needs_heap
def test_tensors_live_in_the_heap_while_it_is_applied_and_may_outlive_it(output_of: OutputOf) -> None:
    assert output_of("""
before = tensor(8)
handler.apply("tensor-heap")
inside, small = tensor(8), torch.ones(100)
figures = hooked_heap().figures
print(figures().num_blocks, figures().live_bytes // MIB)
del before                      # malloc's own block goes back to malloc
handler.undo()
after = tensor(8)
print(handler.policy, figures().num_blocks, float(inside.sum()) == 2 * MIB)
del inside
print(figures().num_blocks, figures().live_bytes)
""") == ["1 8", "None 1 True", "0 0"]


@needs_heap
def test_freed_tensors_leave_no_gaps_that_nothing_fits(output_of: OutputOf) -> None:
    """GIVEN many small tensors between large ones WHEN larger ones follow THEN the process grows by what is live."""
    grown, num_blocks = output_of("""
handler.apply("tensor-heap")
base = process_bytes()
kept, large = [], []
for _ in range(800):
    large.append(tensor(0.25))
    kept.append(torch.ones(3))
large.clear()
wide = [tensor(50) for _ in range(4)]
print((process_bytes() - base) // MIB)
print(hooked_heap().figures().num_blocks)
""")
    assert 199 <= int(grown) <= 204
    assert num_blocks == "4"


@needs_heap
def test_a_limit_holds_the_process_although_gaps_are_free(output_of: OutputOf) -> None:
    (grown, intact) = output_of("""
base = process_bytes()
handler.apply("tensor-heap", limit_bytes=base + 205 * MIB)
narrow = [tensor(0.5) for _ in range(400)]
del narrow[::2]
wide = [tensor(10) for _ in range(10)]
print((process_bytes() - base) // MIB)
print(all(float(t.sum()) == t.numel() for t in narrow + wide))
""")
    assert 198 <= int(grown) <= 206
    assert intact == "True"


@needs_heap
def test_room_is_what_tensors_may_still_take_below_the_limit(output_of: OutputOf) -> None:
    without, of_none, left = output_of("""
print(handler.room_bytes())
handler.apply("tensor-heap")
print(handler.room_bytes())
base = process_bytes()
handler.apply("tensor-heap", limit_bytes=base + 100 * MIB, outside_bytes=20 * MIB)
held, freed = tensor(30), tensor(10)
del freed
print(handler.room_bytes() // MIB)
""")
    assert (without, of_none) == ("None", "None")
    assert 48 <= int(left) <= 50


@needs_heap
def test_threads_and_forked_children_use_it_too(output_of: OutputOf) -> None:
    assert output_of("""
handler.apply("tensor-heap")
sums = []
def work(number):
    for _ in range(50):
        t = torch.full((MIB // 4 + number,), float(number)); assert float(t[-1]) == number
    sums.append(number)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(sums))
kept = tensor(4)
print(hooked_heap().figures().num_blocks)
is_done = False
def keep_busy():
    while not is_done:
        torch.empty(1 << 18)
busy = threading.Thread(target=keep_busy)
busy.start()
ends = []
for _ in range(40):
    child = os.fork()
    if child == 0:
        t = torch.empty(1 << 18); t.copy_(kept[: 1 << 18]); del t
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
is_done = True
busy.join()
print(ends == [0] * 40, float(kept.sum()) == kept.numel())
del kept
print(hooked_heap().figures().num_blocks)
""") == ["[0, 1, 2, 3, 4, 5, 6, 7]", "1", "True True", "0"]


def test_the_tightest_way_is_the_heap_if_there_is_one(output_of: OutputOf) -> None:
    assert output_of("""
handler.apply_tight()
print(handler.policy)
""") == ["None" if heap_unavailable_reason() else "tensor-heap"]


def test_another_way_is_refused_in_words(output_of: OutputOf) -> None:
    assert output_of("""
from memwall.errors import UsageError
try:
    handler.apply("mmap")
except UsageError as error:
    print(error)
print(handler.policy)
""") == ["'mmap' is no allocator policy; expected tensor-heap: make the plan again", "None"]


def test_without_the_library_a_plan_for_it_is_refused_and_malloc_stays(output_of: OutputOf) -> None:
    assert output_of("""
import memwall.apply.memory.allocator as allocator
allocator.heap_unavailable_reason = lambda: "memwall was installed without its C library"
try:
    handler.apply("tensor-heap")
except ApplyError as error:
    print(error)
handler.apply_tight()
print(handler.policy)
""") == ["cannot give tensors a heap of their own: memwall was installed without its C library", "None"]


@needs_heap
@pytest.mark.parametrize(("limit_mib", "kept"), [(1 << 20, "32"), (1, "0")])
def test_free_pages_at_the_peak_are_those_that_the_limit_had_room_for(
    output_of: OutputOf, limit_mib: int, kept: str
) -> None:
    assert output_of(f"""
handler.apply("tensor-heap", {limit_mib} * MIB)
print(handler.kept_bytes())
first, second = tensor(32), tensor(32)
del first
third = tensor(40)  # no room for it where the first was
print(handler.kept_bytes() // MIB)
handler.apply("tensor-heap", {limit_mib} * MIB)
print(handler.kept_bytes())
""") == ["None", kept, "None"]


@needs_heap
def test_memory_outside_the_heap_is_seen_while_it_is_held_and_after(output_of: OutputOf) -> None:
    """GIVEN memory that is taken and given back beside tensors THEN it counts, and what is held on does not."""
    assert output_of("""
import mmap
from memwall.machine.meter import reset_process_peak
def touched(mib):
    memory = mmap.mmap(-1, mib * MIB)
    for page in range(0, mib * MIB, 4096):
        memory[page] = 1
    return memory
print(handler.passing_outside_bytes())
handler.apply("tensor-heap", 1 << 40)
first = tensor(64)
held, passing = touched(16), touched(32)
handler.look_outside()
passing.close()
print(round(handler.passing_outside_bytes() / MIB))
handler.apply("tensor-heap", 1 << 40)
reset_process_peak()
touched(48).close()
handler.look_outside()
print(round(handler.passing_outside_bytes() / MIB))
""") == ["None", "32", "48"]


@needs_heap
def test_what_was_there_before_and_has_gone_did_not_pass(output_of: OutputOf) -> None:
    """GIVEN weights that malloc has WHEN others take their place in the heap THEN nothing passed outside it."""
    assert output_of("""
weights = [tensor(16) for _ in range(4)]
handler.apply("tensor-heap", 1 << 40)
handler.look_outside()
for number in range(4):
    weights[number] = 0.9 * weights[number]
handler.trim()
print(round(handler.passing_outside_bytes() / MIB))
""") == ["0"]


@needs_heap
def test_memory_of_weights_that_a_loop_replaced_goes_back_before_the_step(output_of: OutputOf) -> None:
    """GIVEN weights that malloc has WHEN others take their place THEN the next step begins with these alone."""
    assert output_of("""
weights = [tensor(16) for _ in range(4)]
last = tensor(1)  # malloc returns by itself what is free at its end
handler.apply("tensor-heap", 1 << 40)
handler.begin_step()
before = process_bytes()
for number in range(4):
    weights[number] = 0.9 * weights[number]
print(process_bytes() - before >= 60 * MIB)  # of 64: the kernel may take idle pages of others meanwhile
handler.begin_step()
print(process_bytes() - before < 4 * MIB)
""") == ["True", "True"]


@needs_heap
def test_cycles_that_hold_tensors_are_collected_before_their_pages_are_returned(output_of: OutputOf) -> None:
    assert output_of("""
handler.apply("tensor-heap", 1 << 40)
cycle = [tensor(32)]
cycle.append(cycle)
del cycle
handler.trim()
print(handler._heap.figures().resident_bytes // MIB)
""") == ["0"]
