"""What a process has in use tells growth from a heap that warms up, and finds what goes into its free pieces."""

import logging
import random
import re

import numpy as np
import pytest
import torch
from growing_runs import watched
from torch import nn

from memwall.machine.meter import process_bytes
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


def test_memory_that_nobody_writes_into_is_no_growth(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN buffers that a library asks for and does not touch WHEN the process holds no more THEN nothing is said."""
    in_use = [100 * MIB + 4 * MIB * i for i in range(200)]
    watched([400 * MIB + i % 3 * MIB for i in range(200)], budget_bytes=500 * MIB, in_use=in_use)
    assert caplog.messages == []


def test_a_leak_among_batches_of_many_lengths_is_named_within_20_steps(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN the heap of this process WHEN a loop keeps 3 MiB a step in it THEN its line is told, near a budget."""
    draw, kept = random.Random(0), list[object]()
    model = nn.Module()
    budget_bytes = process_bytes() + 500 * MIB
    watch = GrowthWatch(budget_bytes=lambda: budget_bytes, model=lambda: model, disk=lambda: None)
    for _ in range(20):
        watch.begin_step(process_bytes(), torch.device("cpu"))
        torch.ones(draw.randrange(MIB // 8, MIB // 2)).exp()
        kept.append(np.ones(3 * MIB // 8))
        watch.end_step()
    watch.close()
    (message,) = caplog.messages
    assert re.match(r"memory grows by (2\.9|3\.\d) MiB with each step", message)
    assert re.search(r"what Python allocates in \S*test_heap_rise\.py:\d+ \(3\.0 MiB\)", message)


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
