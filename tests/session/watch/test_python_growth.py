"""Growth beside tensors is named by the lines that keep what Python allocates; a healthy run is not accused."""

import ctypes
import functools
import logging
import os
import re
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from growing_runs import watched

MIB = 1 << 20
STEP_BYTES = 2 * MIB
SOON_BYTES = 900 * MIB
"""A budget that 2 MiB a step reach within 300 steps."""
LATER_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", lambda: MIB)
    monkeypatch.setattr("memwall.session.watch.heap_rise._MOST_SHARE", 1.0)  # steps take no time here


def run(num_steps: int, step: Callable[[int], object], *, budget_bytes: int = SOON_BYTES) -> None:
    """Runs steps, each of which leaves 2 MiB more than the one before."""
    watched([400 * MIB + STEP_BYTES * i for i in range(num_steps)], step=step, budget_bytes=budget_bytes)
    assert not tracemalloc.is_tracing()


def drawn(num_bytes: int = STEP_BYTES) -> object:
    return bytearray(num_bytes)


def in_numpy(num_bytes: int = STEP_BYTES) -> object:
    return np.ones(num_bytes // 8)


def in_objects(num_bytes: int = STEP_BYTES) -> object:
    return [bytes(992) for _ in range(num_bytes // 1024)]


def in_small() -> object:
    return [bytes(448) for _ in range(STEP_BYTES // 500)]


@pytest.mark.parametrize("made", [drawn, in_numpy, in_objects])
@pytest.mark.parametrize(("budget_bytes", "num_steps"), [(SOON_BYTES, 20), (LATER_BYTES, 105)], ids=["soon", "later"])
def test_the_line_that_keeps_what_is_no_tensor_is_named(
    made: Callable[[], object], budget_bytes: int, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN objects that a loop keeps WHEN they reach the budget soon THEN their line is named within 20 steps."""
    kept = []
    run(num_steps, lambda _: kept.append(made()), budget_bytes=budget_bytes)
    (message,) = caplog.messages
    line = made.__code__.co_firstlineno + 1
    assert re.search(rf"it is what Python allocates in \S*test_python_growth\.py:{line} \((1\.9|2\.0) MiB\)", message)
    assert message.endswith(", which a list, a dictionary or a cache keeps")


def test_small_objects_which_lie_beside_the_heap_are_named_within_20_steps(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN objects too small for the C library's heap WHEN they grow, and that does not THEN their line is told."""
    kept = []
    held = [400 * MIB + STEP_BYTES * i for i in range(20)]
    watched(held, step=lambda _: kept.append(in_small()), budget_bytes=SOON_BYTES, in_use=[100 * MIB] * 20)
    assert re.search(rf"py:{in_small.__code__.co_firstlineno + 1} \(\d\.\d MiB\), which", caplog.messages[0])


def test_what_each_step_frees_is_not_taken_for_what_grows(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a step that makes a lot and holds it until the next one THEN the line that keeps little is named alone."""
    kept, held = list[object](), deque[object](maxlen=1)

    def step(_: int) -> None:
        held.append(drawn(16 * MIB))
        kept.append(in_numpy())

    run(20, step)
    (message,) = caplog.messages
    assert f":{in_numpy.__code__.co_firstlineno + 1} (2.0 MiB), which" in message
    assert f":{drawn.__code__.co_firstlineno + 1} " not in message


def test_what_python_does_not_allocate_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN memory that a library takes for itself WHEN it grows THEN no line of the script is accused."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    taken = []
    run(20, lambda _: taken.append(library.malloc(STEP_BYTES)))
    for address in taken:
        library.free(address)
    assert "it is Python objects, a library's memory, a cache that fills" in caplog.messages[0]


def test_a_script_that_traces_itself_goes_on_doing_so(caplog: pytest.LogCaptureFixture) -> None:
    kept = []
    tracemalloc.start()
    try:
        watched(
            [400 * MIB + STEP_BYTES * i for i in range(20)],
            step=lambda _: kept.append(drawn()),
            budget_bytes=SOON_BYTES,
        )
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    assert "it is Python objects" in caplog.messages[0]


def test_without_room_for_notes_it_is_said_as_soon_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    kept, traced = [], list[bool]()

    def step(_: int) -> None:
        kept.append(drawn())
        traced.append(tracemalloc.is_tracing())

    run(20, step, budget_bytes=480 * MIB)
    assert "reaches the budget in about 22 of them; no tensor of step 16 of the plan is held: it is P" in caplog.text
    assert not any(traced)


def test_a_step_that_takes_long_is_not_traced_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a step that imports a lot while it is traced WHEN the time for that is over THEN it goes on untraced."""
    kept, traced = [], list[bool]()

    def step(number: int) -> None:
        kept.append(drawn())
        before = tracemalloc.is_tracing()
        if number == 16:
            deadline = time.monotonic() + 30
            while tracemalloc.is_tracing() and time.monotonic() < deadline:
                time.sleep(0.01)
        traced.append(before and not tracemalloc.is_tracing())

    run(20, step)
    assert [number for number, is_ended in enumerate(traced) if is_ended] == [16]
    assert "it is Python objects" in caplog.messages[0]


def test_a_process_that_is_forked_meanwhile_does_not_trace() -> None:
    """GIVEN a data loader's worker that starts in a step that is traced THEN it runs as fast as ever."""
    traced, statuses = list[bool](), list[int]()

    def step(_: int) -> None:
        traced.append(tracemalloc.is_tracing())
        if traced[-1]:
            child = os.fork()
            if child == 0:
                os._exit(tracemalloc.is_tracing())
            statuses.append(os.waitpid(child, 0)[1])

    run(20, step)
    assert traced.count(True) == 3
    assert statuses == [0, 0, 0]


def healthy_kinds() -> dict[str, Callable[[], Callable[[int], object]]]:
    """Returns steps by name that hold more at first, and stop to."""

    def dictionary() -> Callable[[int], object]:
        kept = dict[int, object]()
        return lambda number: kept.setdefault(number % 40, kept.get(number % 40) or drawn(MIB))

    def bounded() -> Callable[[int], object]:
        return functools.lru_cache(maxsize=40)(lambda number: drawn(MIB))

    def replayed() -> Callable[[int], object]:
        kept = deque[object](maxlen=40)
        return lambda _: kept.append(drawn(MIB))

    def collected() -> Callable[[int], object]:
        kept = list[object]()

        def step(number: int) -> None:
            kept.append(drawn(MIB))
            if number % 40 == 39:
                kept.clear()

        return step

    return {each.__name__: each for each in (dictionary, bounded, replayed, collected)}


@pytest.mark.parametrize("kind", healthy_kinds())
def test_nothing_is_said_of_300_steps_that_hold_real_objects_for_a_while(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN a cache that fills, a window of samples, outputs of an epoch WHEN 300 steps run THEN nothing is said.

    Within 20 steps these do what a leak does, call by call: no count of objects or bytes tells them apart.
    """
    step = healthy_kinds()[kind]()
    held = [400 * MIB + MIB * (number % 40 if kind == "collected" else min(number, 40)) for number in range(300)]
    watched(held, step=step, budget_bytes=LATER_BYTES)
    assert caplog.messages == []
    assert not tracemalloc.is_tracing()


def test_a_step_that_is_not_suspected_is_not_traced() -> None:
    traced = list[bool]()
    watched([400 * MIB] * 60, step=lambda _: traced.append(tracemalloc.is_tracing()), budget_bytes=SOON_BYTES)
    assert not any(traced)
