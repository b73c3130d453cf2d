"""What a step recorded on fake tensors knows of a fused kernel: the FLOPs, workspace and seconds that `cost` gives."""

import pytest
import torch
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for
from memwall.predict.roofline import Roofline
from memwall.trace.fake import record_fake
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload
from memwall.triton_kernels import layer_norm, linear_cross_entropy
from memwall.triton_kernels.linear_cross_entropy import LossShape
from memwall.triton_kernels.linear_cross_entropy import cost as loss_cost
from memwall.triton_kernels.norms import NormShape
from memwall.triton_kernels.norms import cost as norm_cost

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


@pytest.mark.parametrize(("reduction", "recompute"), [("sum", False), ("none", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loss_without_logits(dtype: torch.dtype, reduction: str, recompute: bool) -> None:
    trace = recorded(Head, dtype, reduction, dtype=dtype)
    step, ops = steady_step(trace), own(trace)
    shape = LossShape(
        num_rows=ROWS, hidden_size=WIDTH, vocabulary_size=VOCABULARY, chunk_rows=CHUNK, recompute=recompute
    )
    expected = loss_cost(shape, dtype, H100)
    assert sum(step.ops[op].flops for op in ops) == expected.flops
    # The slab of logits is nobody's result; it lives while the operator runs.
    own_bytes = workspace_bytes(trace)
    if recompute:  # the peak is that of one operator, whose results are both gradients
        results_bytes = (ROWS + VOCABULARY) * WIDTH * dtype.itemsize
        assert own_bytes == expected.transient_bytes - results_bytes
    else:
        assert own_bytes == CHUNK * VOCABULARY * dtype.itemsize + 8 * ROWS
    assert sum(step.ops[op].seconds for op in ops) == pytest.approx(expected.seconds, rel=0.03)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias)


def test_a_norm_whose_backward_adds_up_in_parts() -> None:
    trace = recorded(Norm, dtype=torch.float32)
    step, ops = steady_step(trace), own(trace)
    shape = NormShape(num_rows=ROWS, num_columns=WIDTH, is_layer_norm=True, casting="plain")
    expected = norm_cost(shape, torch.float32, H100)
    assert sum(step.ops[op].seconds for op in ops) == pytest.approx(expected.seconds, rel=0.01)
    tensor_bytes, row_bytes = ROWS * WIDTH * 4, ROWS * 8
    assert workspace_bytes(trace) == expected.transient_bytes - 2 * tensor_bytes - row_bytes
