"""oneDNN's recurrent layers on fake tensors: the workspace that forward keeps is as large as the real one."""

import pytest
import torch
from fake_steps import record_fake
from oracle import count_allocations
from torch import Tensor, nn

from memwall.predict.curve import live_peak_bytes
from memwall.trace.recurrent import LAYER, with_workspace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, SAMPLES = 48, 4


def step_arguments(tokens: int, dtype: torch.dtype = torch.float32, *, train: bool = True) -> tuple[object, ...]:
    """One direction of one LSTM layer, as torch.nn.LSTM calls it."""
    gates = 4 * WIDTH
    weights = (torch.zeros(gates, WIDTH), torch.zeros(gates, WIDTH), torch.zeros(gates), torch.zeros(gates))
    states = (torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH))
    tensors = [tensor.to(dtype) for tensor in (torch.zeros(tokens, SAMPLES, WIDTH), *weights, *states)]
    return (*tensors, False, [], 2, WIDTH, 1, True, False, False, train)


needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no bfloat16 on this processor (no AVX-512), where torch computes such layers without it",
)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_a_short_sequence_has_exactly_its_workspace(tokens: int, dtype: torch.dtype) -> None:
    arguments = step_arguments(tokens, dtype)
    real = LAYER(*arguments)
    empty = (*real[:3], torch.empty(0, dtype=torch.uint8))
    assert with_workspace(arguments, empty)[3].numel() == real[3].numel() > 0


def test_a_long_sequence_has_its_workspace_to_a_page_in_a_hundred() -> None:
    arguments = step_arguments(300)
    real = LAYER(*arguments)
    found = with_workspace(arguments, (*real[:3], torch.empty(0, dtype=torch.uint8)))[3].numel()
    assert found == pytest.approx(real[3].numel(), rel=0.01)


@pytest.mark.parametrize("train", [True, False])
def test_without_a_backward_there_is_no_workspace(train: bool) -> None:
    arguments = step_arguments(5, train=train)
    with torch.no_grad():
        out = (*[torch.zeros(1)] * 3, torch.empty(0, dtype=torch.uint8))
        assert with_workspace(arguments, out)[3].numel() == 0


class Reader(nn.Module):
    """Two layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].sum()


def test_a_step_of_an_lstm_peaks_where_the_allocator_says() -> None:
    workload = Workload(
        model=Reader,
        batch=lambda: torch.ones(SAMPLES, 64, WIDTH),
        loss=lambda model, batch: model(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    model, batch = workload.make_model(), workload.make_batch()
    optimizer = workload.make_optimizer(model)

    def step() -> None:
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    true = count_allocations(step, [*model.parameters(), batch], warm_steps=1).peak_bytes
    fake = record_fake(workload, has_cpu_workspaces=True)
    assert live_peak_bytes(fake.steps[1], "cpu") == pytest.approx(true, rel=0.001)
    assert true > 2 * sum(parameter.nbytes for parameter in model.parameters())
