"""What a step recorded on fake tensors knows of a fused kernel: its FLOPs, workspace and seconds."""

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for
from memwall.predict.roofline import Roofline
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload
from memwall.triton_kernels import linear_cross_entropy

H100 = hardware_named("h100-80gb")
ROWS, WIDTH, VOCABULARY, CHUNK = 4096, 1024, 32_000, 1024


class Head(nn.Module):
    def __init__(self, dtype: torch.dtype, reduction: str) -> None:
        super().__init__()
        self.weight, self.reduction = nn.Parameter(torch.empty(VOCABULARY, WIDTH, dtype=dtype)), reduction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(ROWS, dtype=torch.int64)
        return linear_cross_entropy(x, self.weight, target, chunk_rows=CHUNK, reduction=self.reduction)


def recorded(model: type[nn.Module], *args: object, dtype: torch.dtype) -> Trace:
    recording = recording_for(H100)
    workload = Workload(
        model=lambda: model(*args),
        batch=lambda: torch.zeros(ROWS, WIDTH, dtype=dtype, requires_grad=True),
        loss=lambda module, batch: module(batch).float().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return record_fake(
        workload, target="cuda", seconds_of=Roofline(H100), workspaces=recording.workspaces, choices=recording.choices()
    )


def own(trace: Trace) -> list[int]:
    """Operations of the package in the steady step."""
    step = steady_step(trace)
    return [number for number, op in enumerate(step.ops) if trace.names[op.name].startswith("memwall.")]


def workspace_bytes(trace: Trace) -> int:
    """The largest storage that an operation of the package made and did not return."""
    step, ops = steady_step(trace), own(trace)
    return max(
        storage.nbytes
        for index, storage in enumerate(step.storages)
        if storage.birth in ops and index not in step.ops[storage.birth].outputs
    )


def seconds_of(parts: list[tuple[float, float]], dtype: torch.dtype) -> float:
    """Of kernels one after the other, each given by its bytes and FLOPs."""
    rate = H100.flops[str(dtype).removeprefix("torch.")]  # type: ignore[index]
    return sum(max(moved / H100.memory_bytes_per_second, flops / rate) for moved, flops in parts)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loss_without_logits(dtype: torch.dtype, reduction: str) -> None:
    trace = recorded(Head, dtype, reduction, dtype=dtype)
    step, ops = steady_step(trace), own(trace)
    size, head = ROWS * WIDTH * VOCABULARY, VOCABULARY * WIDTH
    assert sum(step.ops[op].flops for op in ops) == (6 if reduction == "sum" else 8) * size
    # The slab of logits is nobody's result; it lives while the operator runs.
    slab_bytes, rounded_bytes = CHUNK * VOCABULARY * dtype.itemsize + 8 * ROWS, head * dtype.itemsize
    own_bytes = slab_bytes
    if reduction == "none" and dtype == torch.bfloat16:  # rounded there from fp32, when the slab is gone
        own_bytes = head * 4 + max(slab_bytes, rounded_bytes) - rounded_bytes
    assert workspace_bytes(trace) == own_bytes
    logits, x, w = CHUNK * VOCABULARY * dtype.itemsize, CHUNK * WIDTH * dtype.itemsize, rounded_bytes
    product, flops = logits + x + w, 2 * CHUNK * head
    chunk = [(product, flops), (3 * logits, 0), (product, flops), (logits + x + 8 * head, flops)]
    parts: list[tuple[float, float]] = 4 * chunk  # type: ignore[assignment]
    parts += 4 * [(product, flops), (logits, 0)] if reduction == "none" else [(2 * 4 * x, 0)]
    parts += [(4 * head + w, 0)]
    assert sum(step.ops[op].seconds for op in ops) == pytest.approx(seconds_of(parts, dtype), rel=0.03)
