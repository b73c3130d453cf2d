"""Which memory is measured: the process's own for a model on the CPU, the device's for one on CUDA.

There is no CUDA here: its calls are stand-ins that say what a card would.
"""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memwall
from memwall.machine import meter
from memwall.machine.meter import (
    CudaMeter,
    HeldBytes,
    HostMeter,
    mapped_bytes,
    meter_of,
    process_bytes,
    process_peak_bytes,
    reset_process_peak,
)
from memwall.trace.trace_builder import TraceBuilder

MIB = 1 << 20
GIB = 1 << 30


class Card:
    """A simulated card of 80 GiB: torch's segments, and 500 MiB of context beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved_bytes = self.peak_reserved_bytes = 3 * GIB
        self.devices: list[object] = []
        calls = {
            "mem_get_info": lambda device: (80 * GIB - 500 * MIB - self.reserved_bytes, 80 * GIB),
            "memory_reserved": lambda device: self.reserved_bytes,
            "memory_stats_as_nested_dict": self._statistics,
            "reset_peak_memory_stats": self._reset,
        }
        for name, call in calls.items():
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(meter, "others_bytes", lambda device: None)

    def _statistics(self, device: object) -> dict[str, object]:
        peak = {"all": {"peak": self.peak_reserved_bytes}}
        return {
            "allocated_bytes": peak,
            "reserved_bytes": peak,
            "active_bytes": {"all": {"peak": 0}},
            "inactive_split_bytes": {"all": {"peak": 0}},
            "num_alloc_retries": 0,
        }

    def _reset(self, device: object) -> None:
        self.devices.append(device)
        self.peak_reserved_bytes = self.reserved_bytes


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def on(device: str) -> nn.Module:
    """A model that says that it is there."""
    model = nn.Module()
    model.parameters = lambda recurse=True: iter([SimpleNamespace(device=torch.device(device))])  # type: ignore
    return model


def test_the_meter_is_that_of_the_models_device() -> None:
    assert isinstance(meter_of(nn.Linear(2, 2)), HostMeter)
    assert isinstance(meter_of(nn.Module()), HostMeter)
    assert isinstance(meter_of(on("cuda:1")), CudaMeter)


def test_a_card_shows_segments_and_what_lies_beside_them(card: Card) -> None:
    meter = CudaMeter(torch.device("cuda", 1))
    assert meter.now_bytes() == 3 * GIB + 500 * MIB
    card.peak_reserved_bytes = 5 * GIB
    assert meter.peak_bytes() == 5 * GIB + 500 * MIB
    assert meter.reset_peak()
    assert card.devices == [torch.device("cuda", 1)]
    assert meter.peak_bytes() == 3 * GIB + 500 * MIB


def test_the_base_of_a_run_on_a_card_is_its_context_whatever_tensors_there_are(card: Card) -> None:
    meter = CudaMeter(torch.device("cuda"))
    assert meter.base_bytes(0) == meter.base_bytes(2 * GIB) == 500 * MIB


def test_the_base_of_a_run_on_a_cpu_is_what_the_process_holds_without_its_tensors() -> None:
    meter = HostMeter()
    assert meter.base_bytes(0) - meter.base_bytes(5 * MIB) == pytest.approx(5 * MIB, abs=MIB)


def test_what_is_held_is_read_anew_once_a_page_came_in_or_the_peak_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """WHEN the process takes memory, or a peak begins THEN what is held is read; WHEN neither THEN only at times."""
    num_faults = 1
    monkeypatch.setattr(meter, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: usage()))

    def usage() -> SimpleNamespace:
        return SimpleNamespace(ru_minflt=num_faults, ru_majflt=0)

    def said(peak: int) -> None:
        monkeypatch.setattr(meter, "_status", lambda: b"VmHWM:\t%d kB\nVmRSS:\t1 kB\n" % peak)

    found = HostMeter()
    said(peak=5)
    assert found.held().peak_bytes == 5 * 1024
    said(peak=7)
    assert found.held().peak_bytes == 5 * 1024
    num_faults += 1
    assert found.held().peak_bytes == 7 * 1024
    said(peak=6)
    found.reset_peak()
    assert found.held().peak_bytes == 6 * 1024
    said(peak=8)
    told = [found.held().peak_bytes for _ in range(8)]
    assert [told[0], told[-1]] == [6 * 1024, 8 * 1024]
    num_faults = 0
    for peak in (9, 10):
        said(peak)
        assert found.held().peak_bytes == peak * 1024, "a system that counts no faults is always read"


def test_shared_memory_is_no_page_of_a_file() -> None:
    """GIVEN a tensor in shared memory, as of a data loader's worker THEN it counts, and not as what is taken back."""
    before = process_bytes(), mapped_bytes()
    shared = torch.ones(16 << 20).share_memory_()
    risen = process_bytes() - before[0], mapped_bytes() - before[1]
    assert risen[0] > shared.nbytes // 2 > risen[1]
    assert mapped_bytes() > 0


def test_memory_that_is_taken_for_a_moment_is_part_of_what_is_held_next() -> None:
    found = HostMeter()
    before_bytes = found.held().peak_bytes
    block = mmap.mmap(-1, before_bytes - process_bytes() + 32 * MIB)
    for offset in range(0, len(block), mmap.PAGESIZE):
        block[offset] = 1
    block.close()
    assert found.held().peak_bytes > before_bytes + 16 * MIB


class Fixed(HostMeter):
    """Says what a test has it say."""

    device = "cuda"

    def now_bytes(self) -> int:
        return 7 * GIB

    def peak_bytes(self) -> int:
        return 9 * GIB

    def held(self) -> HeldBytes:
        return HeldBytes(7 * GIB, 9 * GIB)

    def others_bytes(self) -> None: ...

    def base_bytes(self, tensor_bytes: int) -> int:
        return 500 * MIB


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_session_measures_where_its_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("measurements", "recorded_step"):
        monkeypatch.setattr(f"memwall.session.{module}.meter_of", lambda *_: Fixed())
    monkeypatch.setattr("memwall.trace.trace_builder.meter_of", lambda *_: Fixed())
    monkeypatch.setattr("memwall.session.first_plan.process_bytes", lambda: 0)  # what a first plan imports counts there
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="20GiB") as session:
        train(model, optimizer, 3)
    assert session.measured.first_step_peak_bytes == session.measured.peak_bytes == 9 * GIB
    assert session.trace is not None
    assert session.trace.base_bytes == 500 * MIB


def test_the_base_of_a_recording_on_a_card_has_no_tensors_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall.trace.trace_builder.meter_of", lambda *_: Fixed())
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    train(model, optimizer, 1)
    builder.finish_step(optimizer)
    assert builder.trace(optimizer).base_bytes == 500 * MIB


def test_the_peak_is_this_process_s_though_its_file_stays_open() -> None:
    """GIVEN a process that has read its peak WHEN it forks THEN the child reads its own, which is lower."""
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    parent_bytes = process_peak_bytes()
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        reset_process_peak()
        os.write(start, b"%d" % process_peak_bytes())
        os._exit(0)
    os.waitpid(child, 0)
    child_bytes = int(os.read(end, 32))
    os.close(end)
    os.close(start)
    assert 0 < child_bytes < parent_bytes


@pytest.mark.parametrize("is_reused", [False, True], ids=["closed", "given to another file"])
def test_a_script_may_close_every_file_that_it_finds_open(tmp_path: Path, is_reused: bool) -> None:
    before_bytes = process_peak_bytes()
    (number,) = meter._kept
    os.close(number)
    other = tmp_path / "other"
    other.write_text("VmHWM: 1 kB\n")
    found = os.open(other, os.O_RDONLY)
    if is_reused:
        os.dup2(found, number)
    assert process_peak_bytes() >= before_bytes
    assert HostMeter().held().standing_bytes == pytest.approx(process_bytes(), abs=4 * MIB)
    for each in {found, number} if is_reused else {found}:
        os.close(each)
