"""A communicator as its ranks on the machine show it; here they are stand-ins that print figures."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from memwall.errors import MemwallError
from memwall.machine import communicator
from memwall.machine.communicator import measured_communicator_bytes
from memwall.machine.hardware import Hardware, hardware_named
from memwall.predict.cuda import context
from memwall.predict.cuda.context import with_measured_context

MIB = 1 << 20
A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A machine with these devices, on which each rank runs this script."""
    measured_communicator_bytes.cache_clear()

    def having(devices: list[str], script: str) -> None:
        monkeypatch.setattr(communicator, "_RANK", "import sys\nrank, path, *indices = sys.argv[1:]\n" + script)
        monkeypatch.setattr(context, "measured_context_bytes", lambda index: 500 * MIB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: devices[index])

    yield having
    measured_communicator_bytes.cache_clear()


def measured() -> Hardware:
    return with_measured_context(hardware_named("a100-80gb"))


def test_it_is_the_most_that_a_rank_holds(machine_with: Callable[..., None]) -> None:
    machine_with([A100] * 3, f"print({MIB} * (500 + int(rank)))")
    assert measured().communicator_bytes == (502 * MIB, 502 * MIB)
    assert measured().sources["communicator_bytes"] == "measured on cuda:0, cuda:1, cuda:2 of this machine"


def test_its_ranks_are_on_the_devices_of_the_kind(machine_with: Callable[..., None]) -> None:
    machine_with([A100, T4, A100], f"print({MIB} * int(''.join(indices)))")
    assert measured().communicator_bytes == (2 * MIB, 2 * MIB)


@pytest.mark.parametrize("devices", [[], [T4, T4], [A100, T4]], ids=["none", "of another kind", "one"])
def test_where_there_are_not_several_the_published_range_stays(
    devices: list[str], machine_with: Callable[..., None]
) -> None:
    machine_with(devices, "raise SystemExit('started')")
    assert measured().communicator_bytes == hardware_named("a100-80gb").communicator_bytes


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise RuntimeError('NCCL error')", "one of its ranks ended with RuntimeError: NCCL error"),
        ("pass", "one of its ranks ended with no message"),
        ("print(-5 << 20)", r"went down by 5\.0 MiB; end what else runs there"),
    ],
)
def test_a_rank_that_fails_says_why_and_the_range_stays(
    script: str, message: str, machine_with: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine_with([A100] * 2, script)
    with pytest.raises(MemwallError, match=message):
        measured_communicator_bytes((0, 1))
    with caplog.at_level(logging.WARNING):
        assert measured().communicator_bytes == hardware_named("a100-80gb").communicator_bytes
    assert "the published range is taken instead" in caplog.text


def test_ranks_that_wait_for_one_that_failed_are_ended(
    machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    original = communicator._started
    monkeypatch.setattr(communicator, "_started", lambda *how: started.append(original(*how)) or started[-1])
    machine_with([A100] * 2, "import time\nif rank == '0': raise RuntimeError('it failed')\ntime.sleep(100)")
    with pytest.raises(MemwallError, match="it failed"):
        measured_communicator_bytes((0, 1))
    assert all(process.returncode is not None for process in started)
