"""cuDNN's recurrent layers on the phantom: sizes and places of weights, and what training is assumed to reserve."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from fake_steps import record_fake
from phantom_forecast import peaks_of
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.allocator_events import events_of_steps
from memwall.predict.cuda_allocator.step_peaks import NUM_STEADY
from memwall.trace.workload import Workload

pytestmark = pytest.mark.phantom(numbers=False)
LAYERS = [
    pytest.param(lambda: nn.LSTM(24, 32, num_layers=2, bidirectional=True), id="lstm-2-bidirectional"),
    pytest.param(lambda: nn.LSTM(24, 32, proj_size=8), id="lstm-projected"),
    pytest.param(lambda: nn.LSTM(24, 32, num_layers=2, bias=False, dropout=0.1), id="lstm-without-biases"),
    pytest.param(lambda: nn.GRU(24, 32, num_layers=3), id="gru-3"),
    pytest.param(lambda: nn.RNN(24, 32), id="rnn"),
]


@pytest.mark.parametrize("make", LAYERS)
def test_weights_lie_in_one_buffer_that_they_fill(make: Callable[[], nn.RNNBase]) -> None:
    """GIVEN a layer on the device THEN its weights are views of one storage, side by side, matrices before biases."""
    layer = make().cuda()
    places = sorted((each.data_ptr(), each.nbytes, each.dim()) for each in layer.parameters())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in layer.parameters()}
    # torch asks for biases whether or not a layer has them.
    unused = 0 if layer.bias else layer.num_layers * 2 * 4 * layer.hidden_size * 4
    assert list(storages.values()) == [sum(each.nbytes for each in layer.parameters()) + unused]
    assert all(at + size == following for (at, size, _), (following, *_) in pairwise(places))
    dims = [dim for _, _, dim in places]
    assert dims == sorted(dims, reverse=True)


@pytest.mark.parametrize("make", LAYERS)
def test_a_step_gives_every_weight_a_gradient(make: Callable[[], nn.RNNBase]) -> None:
    layer = make().cuda()
    x = torch.zeros(7, 3, 24, device="cuda", requires_grad=True)
    layer(x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert [None if each.grad is None else each.grad.shape for each in layer.parameters()] == [
        each.shape for each in layer.parameters()
    ]


def test_training_reserves_what_is_assumed_and_inference_nothing() -> None:
    """An LSTM of 64 positions and 128 hidden values: four gates, the cell's state and the output, in float32."""
    layer = nn.LSTM(128, 128).cuda()
    x = torch.zeros(16, 4, 128, device="cuda")

    def held(is_training: bool) -> int:
        layer.train(is_training)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(is_training):
            y, (h, c) = layer(x)
        found = torch.cuda.memory_allocated() - before
        return found - y.untyped_storage().nbytes() - h.untyped_storage().nbytes() - c.untyped_storage().nbytes()

    reserve = 16 * 4 * 128 * (4 + 1 + 1) * 4
    states = 2 * 4 * 128 * 4  # of zeros, which backward reads
    assert held(is_training=True) - held(is_training=False) == reserve + states


@pytest.mark.phantom(card="h100-80gb", numbers=False)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("make", [LAYERS[0], LAYERS[2], LAYERS[3]])
def test_the_translation_foresees_what_torch_requests(make: Callable[[], nn.RNNBase], precision: str) -> None:
    """GIVEN the steps of a layer WHEN they are foreseen without a device THEN both peaks are right to the byte."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            found: Tensor = model(batch)[0].float().pow(2).sum()
        return found

    def steps(place: str) -> tuple[nn.Module, Tensor]:
        return make().to(dtype).to(place), torch.zeros(64, 8, 24, dtype=dtype, device=place)

    workload = Workload(
        model=lambda: steps("cpu")[0],
        batch=lambda: steps("cpu")[1],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    )
    hardware = hardware_named("h100-80gb")
    recording = recording_for(hardware)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    first, *steady = peaks_of(
        events_of_steps(translated(trace, hardware, autocast=recording.autocast).steps, num_repeats=NUM_STEADY)
    )
    model, batch = steps("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    counted = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        counted.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    assert [first["requested_bytes"], steady[-1]["requested_bytes"]] == counted
