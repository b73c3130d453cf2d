"""The link to host memory as a session measures it, on a stand-in for CUDA's streams whose copies take a known time."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memwall.apply.offload.machine_below import machine_above_host
from memwall.apply.techniques import cpu_step
from memwall.apply.techniques.cpu_step import CpuStepHandler
from memwall.errors import StoreError
from memwall.machine import link_speed
from memwall.machine.link_speed import probe_link, rates
from memwall.machine.tiers import Machine, Tier
from memwall.store.pinned_arena import PinnedArena

MIB = 1 << 20
CPU = torch.device("cpu")


class Link:
    """Streams with clocks: the first one that is made copies at the first rate, the second at the second one."""

    def __init__(self, *bytes_per_second: float) -> None:
        self.rates = bytes_per_second
        self.compute = Stream(0.0)
        self.streams: list[Stream] = []
        self.registered_bytes: dict[int, int] = {}

    def stream(self, _: torch.device) -> "Stream":
        self.streams.append(Stream(self.rates[len(self.streams)]))
        return self.streams[-1]

    def synchronize(self, _: torch.device) -> None:
        self.compute.seconds = max(stream.seconds for stream in (self.compute, *self.streams))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        with _Copying(stream):
            yield

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        self.registered_bytes[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered_bytes[address]
        return 0


class Stream:
    def __init__(self, bytes_per_second: float) -> None:
        self.seconds, self.bytes_per_second = 0.0, bytes_per_second

    def record_event(self, event: "Event") -> "Event":
        event.seconds = self.seconds
        return event

    def wait_event(self, event: "Event") -> None:
        self.seconds = max(self.seconds, event.seconds)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.seconds = 0.0

    def elapsed_time(self, end: "Event") -> float:
        return (end.seconds - self.seconds) * 1e3


class _Copying(TorchFunctionMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "copy_":
            assert (kwargs or {})["non_blocking"]
            self._stream.seconds += args[1].nbytes / self._stream.bytes_per_second
        return func(*args, **(kwargs or {}))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """24.4 GB/s to the host, 12.6 GB/s to the device."""
    made = Link(2.44e10, 1.26e10)
    monkeypatch.setattr(link_speed, "cuda_segment_room_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.compute)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_each_direction_is_measured_and_nothing_stays_pinned(link: Link) -> None:
    assert probe_link(CPU, limit_bytes=32 * MIB) == Tier(
        name="host", write_bytes_per_second=2.4e10, read_bytes_per_second=1.3e10, free_bytes=32 * MIB
    )
    assert not link.registered_bytes


def test_directions_that_hinder_each_other_count_as_slower() -> None:
    alone = rates(0.001, 0.002, 0.002)
    assert alone == (float(f"{16 * MIB / 0.001:.1e}"), float(f"{16 * MIB / 0.002:.1e}"))
    assert rates(0.001, 0.002, 0.003) == alone
    # Both at once take twice as long as one after the other: so does each.
    assert rates(0.001, 0.002, 0.006) == tuple(float(f"{16 * MIB / s:.1e}") for s in (0.002, 0.004))


def test_the_probe_keeps_to_the_limit(link: Link) -> None:
    with pytest.raises(StoreError, match="the limit of"):
        probe_link(CPU, limit_bytes=16 * MIB)
    assert not link.registered_bytes


def test_plans_know_the_link_what_they_may_pin_and_the_cpu_if_it_may_step(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_step, "_bytes_per_second", lambda dtype: 1.5e10 * torch.finfo(dtype).bits / 16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card that nobody knows")
    found = machine_above_host(CPU, limit_bytes=1 << 30)
    host = Tier(name="host", write_bytes_per_second=2.4e10, read_bytes_per_second=1.3e10, free_bytes=1 << 30)
    assert found.tiers == (host,)
    assert found.cpu_step_bytes_per_second == 0.0
    # The device copies: the host's cores do nothing for it.
    assert found.copy_seconds_per_byte == 0.0
    measured = CpuStepHandler.measured(found)
    assert measured.tiers == (host,)
    assert (measured.cpu_step_bytes_per_second, measured.cpu_step_bfloat16_bytes_per_second) == (3e10, 1.5e10)


def test_where_nothing_can_be_pinned_plans_leave_host_memory_out(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    found = machine_above_host(CPU, limit_bytes=1 << 30)
    assert found == CpuStepHandler.measured(found) == Machine()
    assert "plans leave out host memory: the CUDA driver refuses to pin" in caplog.text


def test_what_the_driver_refuses_to_pin_is_no_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a runtime that remembers its last error, and torch, which raises it at a launch WHEN pinning is refused
    THEN it is forgotten: the training that goes on without host memory must not meet it."""
    remembered: list[int] = []

    def refuse(*_: int) -> int:
        remembered.append(2)
        return 2

    def launch(*_: Any, **__: Any) -> None:
        if remembered:
            remembered.clear()
            raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(StoreError, match=r"the CUDA driver refuses to pin 16.0 MiB of host memory \(error 2\)"):
        PinnedArena(None, chunk_bytes=0).allocate(16 * MIB)
    assert not remembered
