"""Steps as a device would run them, and what one operator of such a step allocates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_history import History
from fake_steps import record_fake
from snapshot_runs import Explained, imported
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.snapshot.analysis import DeviceAnalysis, analyse_device
from memwall.predict.snapshot.timeline import Timeline
from memwall.trace.records import Step, Trace
from memwall.trace.workload import Workload

BATCH, HEADS, TOKENS, SIZE = 2, 4, 80, 16
WIDTH = HEADS * SIZE


class _Attention(nn.Module):
    """Self-attention; queries, keys and values lie in memory as [batch, tokens, heads, size]."""

    def __init__(self, key_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.key_heads, self.options = key_heads, options
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, key_heads * SIZE), nn.Linear(WIDTH, key_heads * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(BATCH, TOKENS, -1, SIZE).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, **self.options)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


def _in_dtype(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What a factory makes where tensors have this dtype by default: a module of fake tensors can't be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _workload_of(
    model: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch).float().sum(),
) -> Workload:
    return Workload(
        model=lambda: _in_dtype(model, dtype),
        batch=lambda: _in_dtype(batch, dtype),
        loss=loss,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    )


def _recorded(workload: Workload, device: str) -> Trace:
    """A workload as a device would run it."""
    hardware = hardware_named(device)
    recording = recording_for(hardware)
    trace = record_fake(
        workload,
        target="cuda",
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    return translated(trace, hardware, autocast=recording.autocast)


def _attending(dtype: torch.dtype, device: str, **options: Any) -> Trace:
    workload = _workload_of(lambda: _Attention(**options), lambda: torch.ones(BATCH, TOKENS, WIDTH), dtype)
    return _recorded(workload, device)


def _numbers_of(trace: Trace, step: Step, name: str) -> list[int]:
    return [number for number, op in enumerate(step.ops) if trace.names[op.name] == f"aten.{name}.default"]


def _workspace_of(trace: Trace, name: str) -> int:
    """Bytes that the one call of an operator allocates besides its results."""
    step = trace.steps[-1]
    (number,) = _numbers_of(trace, step, name)
    own = [
        storage.nbytes
        for index, storage in enumerate(step.storages)
        if storage.birth == number and index not in step.ops[number].outputs
    ]
    return sum(own)


def _new_bytes(trace: Trace, name: str) -> list[int]:
    """Bytes of what the one call of an operator returns anew."""
    step = trace.steps[-1]
    (number,) = _numbers_of(trace, step, name)
    return [step.storages[i].nbytes for i in step.ops[number].outputs if step.storages[i].birth == number]


@pytest.fixture(scope="session")
def workload_of() -> Callable[..., Workload]:
    """(model, batch, dtype, optimizer, loss), model and batch as factories -> a workload with SGD and a sum as loss."""
    return _workload_of


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Trace]:
    """(workload, device) -> the workload as the device would run it."""
    return _recorded


@pytest.fixture(scope="session")
def attending() -> Callable[..., Trace]:
    """(dtype, device, **options of the attention call) -> one layer of self-attention, recorded."""
    return _attending


@pytest.fixture(scope="session")
def numbers_of() -> Callable[..., list[int]]:
    """(trace, step, operator) -> the places of its calls in the step."""
    return _numbers_of


@pytest.fixture(scope="session")
def workspace_of() -> Callable[..., int]:
    """(trace, operator) -> bytes that its one call in a steady step allocates besides its results."""
    return _workspace_of


@pytest.fixture(scope="session")
def new_bytes() -> Callable[..., list[int]]:
    """(trace, operator) -> bytes of what its one call in a steady step returns anew."""
    return _new_bytes


@pytest.fixture
def explained(tmp_path: Path) -> Explained:
    def explain(history: History) -> tuple[DeviceAnalysis, Timeline]:
        return analyse_device(imported(history.snapshot(), tmp_path), 0)

    return explain
