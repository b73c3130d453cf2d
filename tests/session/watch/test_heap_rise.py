"""What a process has in use tells growth from a heap that warms up, and finds what goes into its free pieces."""

import logging

import pytest
import torch
from growing_runs import watched
from torch import nn

from memwall.session.watch.growth import GrowthWatch
from memwall.session.watch.heap_rise import HeapRise, heap_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", lambda: MIB)
    monkeypatch.setattr("memwall.session.watch.heap_rise._MOST_SHARE", 1.0)  # steps take no time here


def test_a_heap_whose_free_pieces_grow_is_not_told_as_a_leak(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN batches of many lengths, under which free pieces grow THEN that is said after 80 steps, as what it is."""
    held = [400 * MIB + 4 * MIB * i for i in range(110)]
    in_use = [100 * MIB + i % 3 * MIB for i in range(110)]
    watched(held[:98], step=lambda _: torch.ones(MIB), budget_bytes=1000 * MIB, in_use=in_use)
    assert caplog.messages == []
    watched(held, step=lambda _: torch.ones(MIB), budget_bytes=1000 * MIB, in_use=in_use)
    (message,) = caplog.messages
    assert "and of the heap no more is in use: it is free pieces there, as batches of many lengths leave" in message


def test_what_goes_into_free_pieces_of_the_heap_is_found_within_20_steps(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a heap that rises by jumps, and what is in use by as much each step THEN that is found, with its figure."""
    held = [400 * MIB + 60 * MIB * (i >= 3) + 70 * MIB * (i >= 17) for i in range(20)]
    in_use = [100 * MIB + 4 * MIB * i for i in range(20)]
    watched(held, step=lambda _: torch.ones(MIB), budget_bytes=1000 * MIB, in_use=in_use)
    (message,) = caplog.messages
    assert message.startswith("memory grows by 4.0 MiB with each step")
    assert "it is Python objects, a library's memory" in message


def test_python_blocks_that_grow_bear_a_rise_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN small objects, which lie beside the C library's heap WHEN they grow THEN that is said within 20 steps."""
    number = [0]
    monkeypatch.setattr("memwall.session.watch.heap_rise.sys.getallocatedblocks", lambda: 40_000 * number[0])

    def step(done: int) -> None:
        number[0] = done + 1

    held = [400 * MIB + 4 * MIB * i for i in range(20)]
    watched(held, step=step, budget_bytes=1000 * MIB, in_use=[100 * MIB] * 20)
    assert "it is Python objects" in caplog.messages[0]


@pytest.mark.parametrize(("look_seconds", "num_rows"), [(0.00005, 4), (0.003, 0)])
def test_the_heap_is_asked_no_more_than_is_cheap(
    monkeypatch: pytest.MonkeyPatch, look_seconds: float, num_rows: int
) -> None:
    """GIVEN steps of 30 ms WHEN the heap takes so long to say what is in use THEN it is asked in rows, or hardly."""
    clock, asked = [0.0], list[int]()
    monkeypatch.setattr("memwall.session.watch.heap_rise._MOST_SHARE", 0.001)
    monkeypatch.setattr("memwall.session.watch.heap_rise.time.perf_counter", lambda: clock[0])

    def heap() -> int:
        clock[0] += look_seconds
        asked.append(number[0])
        return 0

    monkeypatch.setattr("memwall.session.watch.heap_rise.heap_bytes", heap)
    rise, number = HeapRise(8 * MIB), [0]
    for number[0] in range(200):
        clock[0] += 0.03
        rise.begin_step(is_rising=True)
    assert len(asked) * look_seconds < 0.003 * clock[0] + look_seconds
    assert sum(asked[i + 23] - asked[i] == 23 for i in range(0, len(asked) - 23, 24)) >= num_rows


def test_a_process_that_does_not_rise_is_asked_in_its_first_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr("memwall.session.watch.heap_rise.heap_bytes", lambda: asked.append(0) or 0)
    rise = HeapRise(8 * MIB)
    for _ in range(100):
        rise.begin_step(is_rising=False)
    assert len(asked) == 16


def test_the_c_library_tells_what_is_in_use() -> None:
    before = heap_bytes()
    held = torch.empty(64 * MIB, dtype=torch.uint8)
    during = heap_bytes()
    assert before is not None
    assert during is not None
    assert 64 * MIB <= during - before < 80 * MIB
    del held
    assert (heap_bytes() or 0) < during - 48 * MIB


def test_where_no_heap_tells_a_rise_has_to_go_on_for_longer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a C library without that figure WHEN memory beside tensors grows THEN it is said after 80 steps."""
    monkeypatch.setattr("memwall.session.watch.heap_rise._mallinfo", lambda: None)
    model = nn.Module()
    watch = GrowthWatch(budget_bytes=lambda: 1000 * MIB, model=lambda: model, disk=lambda: None)
    said_at = []
    for number in range(110):
        watch.begin_step(100 * MIB + 4 * MIB * number, torch.device("cpu"))
        watch.end_step()
        said_at += [number] * (len(caplog.messages) > len(said_at))
    watch.close()
    assert said_at
    assert said_at[0] > 80
