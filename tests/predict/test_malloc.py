"""Replaying allocations against malloc: what stays resident, what comes back, and whether real processes agree."""

import json
import pickle
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Sequence

import pytest

from memwall.errors import UsageError
from memwall.machine.tiers import Machine
from memwall.predict.malloc import malloc_replay as subject
from memwall.predict.malloc.malloc_calls import StepEvents, events_of, repeated
from memwall.predict.malloc.malloc_process import ALLOCATE, FREE, MOVE, STEP, resident_pages
from memwall.predict.process import ProcessModel
from memwall.trace.records import Category, Op, Phase, Step, Storage, Trace

MIB = 1 << 20
BLOCK = 100 << 10

pytestmark = pytest.mark.skipif(
    bool(subject.unavailable_reason()), reason=f"no glibc malloc: {subject.unavailable_reason()}"
)


def storage(nbytes: int, birth: int, death: int, *, category: Category = "activation", device: str = "cpu") -> Storage:
    return Storage(
        nbytes=nbytes,
        device=device,
        category=category,
        birth=birth,
        dropped=death,
        death=death,
        module=0,
        phase="forward",
        batched=False,
    )


def step(storages: list[Storage], phases: list[Phase]) -> Step:
    ops = tuple(
        Op(name=0, module=0, phase=phase, seconds=0.0, flops=0, inputs=(), outputs=(), writes=()) for phase in phases
    )
    return Step(
        kind="steady",
        ops=ops,
        storages=tuple(storages),
        saved=(),
        calls=(),
        marks=(),
        wall_seconds=0.0,
        process_peak_bytes=0,
    )


def triples(events: Sequence[int]) -> list[tuple[int, int, int]]:
    flat = list(events)
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def comb(num_blocks: int) -> StepEvents:
    """Allocates blocks of 100 KiB, frees every second one, then asks for blocks that fit no gap."""
    out = StepEvents()
    slots = [out.allocate(ALLOCATE, BLOCK) for _ in range(num_blocks)]
    out.free(slots[::2])
    wide = [out.allocate(ALLOCATE, 2 * BLOCK) for _ in range(num_blocks // 4)]
    out.free(wide + slots[1::2])
    return out


# -- pages -----------------------------------------------------------------------------------------------------------


def test_gaps_that_nothing_fits_stay_resident_in_mallocs_heap() -> None:
    pages = subject.replay(comb(400), num_steps=1)
    assert 590 * BLOCK <= pages.peak_resident_bytes <= 610 * BLOCK


def test_by_default_a_heap_shrinks_when_its_end_is_freed() -> None:
    out = StepEvents()
    out.free([out.allocate(ALLOCATE, 100 << 10) for _ in range(200)][::-1])
    pages = subject.replay(out, num_steps=2)
    assert pages.peak_resident_bytes >= 200 * 100 << 10
    # What stays is the top pad and the last blocks above the trim threshold, however Python's own heap lies before it.
    assert pages.fresh_bytes > 0.9 * pages.peak_resident_bytes


def test_pages_shared_by_two_blocks_count_once() -> None:
    page = 4096
    events = [STEP, 0, 0, ALLOCATE, 0, 1000, ALLOCATE, 1, 1000, FREE, 0, 0]
    figures = resident_pages(events, [0, 1 << 20, (1 << 20) + 1024, 0], [0] * 4, [2 << 20] * 4, page)
    # The header in front of the first block lies on the page before.
    assert figures[0]["peak_resident_bytes"] == 2 * page


def test_the_same_replay_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(7919 * n) % 900_000 + 1 for n in range(400)]
    storages = [storage(size, n, min(n + 1 + size % 97, 400)) for n, size in enumerate(sizes)]
    events = events_of(step(storages, ["forward"] * 200 + ["backward"] * 200))
    first = subject.replay(events, num_steps=2)
    monkeypatch.setattr(subject, "_replays", {})
    assert subject.replay(events, num_steps=2) == first


def test_a_replay_leaves_its_forecast_and_none_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a process that plans and then trains WHEN a step was replayed THEN its megabytes of events are gone."""
    ran: list[int] = []

    def forecast(events: bytes, *_: object) -> subject.MallocForecast:
        ran.append(len(events))
        return subject.MallocForecast(peak_resident_bytes=1, fresh_bytes=0)

    monkeypatch.setattr(subject, "_replays", {})
    monkeypatch.setattr(subject, "_replayed", forecast)
    for num_blocks in (5000, 5000, 4000, 5000):
        subject.replay(comb(num_blocks), num_steps=2)
    assert len(ran) == 2
    assert len(pickle.dumps(subject._replays)) < 4096
    for num_steps in range(1, 40):
        subject.replay(comb(10), num_steps=num_steps)
    assert len(subject._replays) == 16


def test_ten_thousand_calls_replay_in_a_fraction_of_a_second() -> None:
    out = StepEvents()
    for _ in range(50):
        out.free([out.allocate(ALLOCATE, 300_000 + 64 * n) for n in range(100)])
    pages = subject.replay(out, num_steps=1, timeout_s=5.0)
    assert len(out.events) // 3 == 10_000
    assert pages.peak_resident_bytes > 30_000_000


# -- a step's calls --------------------------------------------------------------------------------------------------


def test_at_an_operation_frees_come_before_its_own_blocks() -> None:
    events = events_of(step([storage(10, 0, 1), storage(20, 1, 2)], ["forward", "forward"]), has_small_blocks=False)
    # The second storage dies with the last operation, so it outlives the step.
    assert triples(events.events) == [(ALLOCATE, 0, 10), (FREE, 0, 0), (ALLOCATE, 1, 20)]
    assert [nbytes for nbytes, _ in events.after] == [20]


def test_only_memory_of_the_process_is_replayed() -> None:
    events = events_of(step([storage(10, 0, 1, device="cuda:0"), storage(0, 0, 1)], ["forward"]))
    assert triples(events.events) == []


def test_graph_nodes_of_a_forward_live_until_its_backward() -> None:
    events = events_of(step([storage(1000, 0, 1), storage(1000, 3, 4)], ["forward", "loss", "backward", "backward"]))
    calls = triples(events.events)
    (node,) = [slot for kind, slot, nbytes in calls if nbytes == 472]
    second = [number for number, call in enumerate(calls) if call[0] == ALLOCATE][1]
    assert calls.index((FREE, node, 0)) > second


def test_what_outlives_a_step_takes_the_place_of_what_the_next_one_expects() -> None:
    gradients = [storage(700, -1, 1, category="gradient"), storage(700, 1, 3, category="gradient")]
    steady = events_of(
        step([storage(5000, -1, 3, category="parameter"), *gradients], ["forward", "backward", "optimizer"]),
        has_small_blocks=False,
    )
    assert triples(repeated(steady, 2)) == [
        (ALLOCATE, 0, 5000),
        (ALLOCATE, 1, 700),
        (STEP, 0, 0),
        (FREE, 1, 0),
        (ALLOCATE, 2, 700),
        (STEP, 0, 0),
        (MOVE, 1, 2),
        (FREE, 1, 0),
        (ALLOCATE, 2, 700),
    ]


def test_a_gradient_that_lives_until_it_is_zeroed_does_not_pile_up() -> None:
    events = events_of(
        step([storage(MIB, -1, 1, category="gradient"), storage(MIB, 1, 2, category="gradient")], ["backward"] * 2)
    )
    live: dict[int, int] = {}
    for kind, slot, nbytes in triples(repeated(events, 4)):
        if kind == MOVE:
            live[slot] = live.pop(nbytes)
        elif kind == FREE:
            del live[slot]
        elif kind != STEP:
            live[slot] = nbytes
        assert sum(live.values()) < 1.5 * MIB
    assert sum(live.values()) > MIB


def test_address_space_that_malloc_refuses_is_a_typed_error() -> None:
    out = StepEvents()
    out.free([out.allocate(ALLOCATE, 1 << 60)])
    with pytest.raises(UsageError) as error:
        subject.replay(out, num_steps=1)
    assert str(error.value) == (
        "replaying 3 allocations failed: event 1: malloc refused to reserve "
        "1152921504606846976 bytes of address space; see whether the address space is limited (ulimit -v)"
    )


def test_without_glibc_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert subject.unavailable_reason()
    with pytest.raises(UsageError) as error:
        subject.replay(StepEvents())
    assert str(error.value) == "cannot replay allocations: that needs Linux with glibc; this is darwin"


# -- against a real process ------------------------------------------------------------------------------------------

_TOUCH = """
import ctypes, json, sys
from array import array
from pathlib import Path
events = array("q", json.loads(sys.stdin.read()))
libc = ctypes.CDLL(None)
libc.memalign.restype, libc.memalign.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
slots, base = {}, status("VmRSS")
for position in range(0, len(events), 3):
    kind, slot, nbytes = events[position : position + 3]
    if kind <= 1:
        slots[slot] = libc.memalign(64, nbytes)
        ctypes.memset(slots[slot], 1, nbytes)
    elif kind == 2:
        libc.free(slots.pop(slot))
print(status("VmHWM") - base)
"""


def test_a_process_that_writes_the_same_blocks_gets_as_large_as_predicted() -> None:
    sizes = [(104729 * n) % 1_500_000 + 100_000 for n in range(120)]
    storages = [storage(size, n, 240 - n) for n, size in enumerate(sizes)]
    storages += [storage(size + 5000, 120 + n, 122 + n) for n, size in enumerate(sizes[:-2])]
    events = events_of(step(storages, ["forward"] * 120 + ["backward"] * 120), has_small_blocks=False)
    predicted_bytes = subject.replay(events, num_steps=1).peak_resident_bytes
    done = subprocess.run(
        [sys.executable, "-S", "-c", _TOUCH],
        input=json.dumps(list(events.events)),
        capture_output=True,
        text=True,
        check=True,
    )
    measured_bytes = int(done.stdout)
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.03)


def test_a_step_of_too_many_tensors_is_foreseen_by_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step that would take long and much memory to replay WHEN its plain peak is asked for THEN it has one."""
    short = step([storage(8 * MIB, 0, 1), storage(4 * MIB, 1, 2)], ["forward", "backward"])
    trace = Trace(
        schema="memwall.trace/2",
        source="recorded",
        device="cpu",
        torch_version="2.13.0",
        num_threads=1,
        model_fingerprint="",
        optimizer="",
        micro_batch=1,
        gradients_persist=False,
        num_micro_batches=1,
        autocast="none",
        is_parked=False,
        base_bytes=MIB,
        workspace_bytes=0,
        machine=Machine(),
        names=(),
        modules=(),
        steps=(short,),
        input_shape=(),
        input_dtype="",
    )
    process = ProcessModel(trace)
    monkeypatch.setattr("memwall.predict.process._MOST_REPLAYED_STORAGES", 1)
    monkeypatch.setattr("memwall.predict.process.replay", None)
    assert process.free(short).process_bytes == process.bare(short).process_bytes == 9 * MIB


def test_what_works_out_resident_pages_holds_little_beside_the_calls_themselves() -> None:
    """It runs beside the training, whose budget it is no part of: copies of a million calls would pass that."""
    num_calls = 20_000
    events = array("q")
    for _ in range(num_calls // 2):
        events.extend((ALLOCATE, 0, 4096, FREE, 0, 0))
    addresses, mapped = array("q", [1 << 30, 0] * (num_calls // 2)), array("q", bytes(8 * num_calls))
    heap_ends = array("q", [(1 << 30) + 8192] * num_calls)
    tracemalloc.start()
    try:
        resident_pages(events, addresses, mapped, heap_ends, 4096)
        held_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held_bytes < num_calls  # an array of that length has eight times as many
