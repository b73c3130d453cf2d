"""Failures to get memory are told from others, and what they asked for."""

import pytest
import torch
from torch import nn

import memwall
from memwall.apply.memory.exhaustion import exhaustion_of
from memwall.cli.app import main
from memwall.errors import OutOfMemoryError
from memwall.machine.meter import HostMeter

MIB = 1 << 20


@pytest.mark.parametrize(
    ("error", "asked_bytes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 2560 * MIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes."), 512),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
            ),
            1 << 32,
        ),
        (MemoryError("Unable to allocate 8.00 MiB for an array with shape (1024, 1024)"), 8 * MIB),
        (MemoryError(), 0),
        (OSError(12, "Cannot allocate memory"), 0),
        (RuntimeError("CUDA error: out of memory"), 0),
        (RuntimeError("HIP error: out of memory"), 0),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), 0),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), 0),
        (RuntimeError("miopenStatusAllocFailed"), 0),
        (
            RuntimeError(
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            0,
        ),
        (
            RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'invalid'"),
            None,
        ),
        (RuntimeError("the loop ran out of memory of its own kind"), None),
        (OSError(28, "No space left on device"), None),
        (ValueError("Tried to allocate 2.00 GiB"), None),
    ],
)
def test_failures_to_get_memory_are_told_from_others(error: Exception, asked_bytes: int | None) -> None:
    found = exhaustion_of(error, "forward", HostMeter())
    assert (None if found is None else found.asked_bytes) == asked_bytes
    assert found is None or found.held_bytes > 50 * MIB


def _fails() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")


def test_memory_that_runs_out_in_memwall_itself_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN no memory for what a session or a command does WHEN it begins THEN it says so, without a traceback."""
    monkeypatch.setattr("memwall.session.session.settle_first_calls", _fails)
    model = nn.Linear(2, 2)
    with pytest.raises(OutOfMemoryError, match=r"out of memory outside any training step.*4\.0 KiB could not be had"):
        memwall.fit(model, torch.optim.SGD(model.parameters()), budget="1GiB")
    monkeypatch.setattr("memwall.session.session.Session.explained", lambda *_: None)
    assert main(["run", "--budget", "8GiB", "--json", __file__]) == 3
    said = capsys.readouterr().err
    where = "out of memory outside any training step, before the first step"
    assert f"memwall: {where}: 4.0 KiB could not be had while the process held" in said
    assert "Traceback" not in said
