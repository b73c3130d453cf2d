"""An evaluation in larger batches is foreseen from a recorded training step."""

import msgspec
import pytest
import torch
from torch import nn

import memwall
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak, return_free_memory
from memwall.predict.evaluation import copying_bytes, evaluation_bytes
from memwall.predict.state_on_disk import with_state_on_disk
from memwall.torch_internals.profiler import begin_watching_allocations, end_watching_allocations
from memwall.trace.trace_builder import TraceBuilder

MIB = 1 << 20


def test_it_is_the_forward_of_a_larger_batch_without_what_backward_needs() -> None:
    """GIVEN three layers of which each holds 1 MiB for 256 samples WHEN 1,024 are evaluated THEN two live at once."""
    workload = memwall.Workload(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))),
        batch=lambda: torch.zeros(256, 1024),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = msgspec.structs.replace(memwall.record(workload, num_steps=1), base_bytes=100 * MIB, workspace_bytes=MIB)
    weights, batch = 3 * 4 * MIB, 4 * MIB
    expected = 100 * MIB + 4 * MIB + weights + batch + 2 * batch
    assert abs(evaluation_bytes(trace, trace.steps[0], batch=1024) - expected) <= batch
    assert evaluation_bytes(trace, trace.steps[0], batch=256) < evaluation_bytes(trace, trace.steps[0], batch=1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_may_be_without_the_autocast_of_the_steps(dtype: torch.dtype) -> None:
    """GIVEN steps under autocast WHEN one is foreseen without THEN results of single precision's weights are so too."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).sum()

    workload = memwall.Workload(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))).to(dtype),
        batch=lambda: torch.zeros(4096, 1024, dtype=dtype),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = msgspec.structs.replace(memwall.record(workload, num_steps=1), base_bytes=0, workspace_bytes=0)
    usual, without = (
        evaluation_bytes(trace, trace.steps[0], batch=4096, may_lack_autocast=may_lack) for may_lack in (False, True)
    )
    weights, batch, results = 3 * dtype.itemsize * MIB, 4 * dtype.itemsize * MIB, 2 * 4 * dtype.itemsize * MIB
    assert abs(without - weights - batch - results) <= 2 * MIB
    if dtype is torch.float32:  # what is cast, and the weights' own copies
        assert abs(usual - weights - batch - 4 * 2 * MIB * 2 - 3 * 2 * MIB) <= 4 * MIB
    else:
        assert usual == without


def test_a_model_with_one_parameter_in_half_precision_runs_under_autocast_all_the_same() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).sum()

    workload = memwall.Workload(
        model=lambda: nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8).bfloat16()),
        batch=lambda: torch.zeros(4096, 1024),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = memwall.record(workload, num_steps=1)
    usual, without = (
        evaluation_bytes(trace, trace.steps[0], batch=4096, may_lack_autocast=may_lack) for may_lack in (False, True)
    )
    assert without > usual


def test_gradients_stand_that_the_next_step_lets_go_of() -> None:
    """GIVEN a step whose gradients go after its optimizer's WHEN one is evaluated before THEN they are there."""
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    model(torch.zeros(8, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    builder.finish_step(optimizer)
    trace = builder.trace(optimizer)
    gone, kept = (evaluation_bytes(trace, trace.steps[0], batch=8, keeps_gradients=keeps) for keeps in (False, True))
    assert kept - gone == 4 * MIB


@pytest.mark.parametrize("is_in_backward", [True, False])
@pytest.mark.parametrize("keeps_copy", [True, False])
def test_copies_of_the_weights_count_where_gradients_are_let_go_one_by_one(
    is_in_backward: bool, keeps_copy: bool
) -> None:
    """GIVEN four weights of 4 MiB with a momentum each WHEN each is stepped in backward THEN no step has room for two
    copies; a step with all gradients has. They count as well beside a copy that stays."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9) for weight in model.parameters()]

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for optimizer, weight in zip(optimizers, model.parameters(), strict=True) if is_in_backward else ():
        weight.register_post_accumulate_grad_hook(lambda _, each=optimizer: step(each))
    builder = TraceBuilder([model])
    builder.start_step(optimizers)
    model(torch.zeros(8, 1024)).sum().backward()
    for optimizer in () if is_in_backward else optimizers:
        step(optimizer)
    builder.finish_step(optimizers)
    trace = msgspec.structs.replace(builder.trace(optimizers), base_bytes=100 * MIB, workspace_bytes=0)
    expected = 100 * MIB + (4 + 4 + 2 * 4) * 4 * MIB if is_in_backward or keeps_copy else 0
    assert abs(copying_bytes(trace, trace.steps[0], trace.steps[0], keeps_copy=keeps_copy) - expected) <= MIB
    # The momenta pass through memory in buckets: 16 MiB less stand, and a step has no room for two copies either.
    moved = with_state_on_disk(trace.steps[0], resident_bytes=0, bucket_bytes=4 * MIB, min_bytes=1)
    standing = 100 * MIB + (4 + 2 * 4) * 4 * MIB
    assert abs(copying_bytes(trace, trace.steps[0], moved, keeps_copy=keeps_copy) - standing) <= MIB


def test_a_recurrent_layer_keeps_no_gates_in_an_evaluation() -> None:
    """GIVEN an LSTM that was trained WHEN more is evaluated THEN it holds what is foreseen, which is no allocation."""
    workload = memwall.Workload(
        model=lambda: _LastOf(nn.LSTM(28, 64, batch_first=True)),
        batch=lambda: torch.zeros(16, 28, 28),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = msgspec.structs.replace(memwall.record(workload, num_steps=1), base_bytes=0, workspace_bytes=0)
    batch, model = torch.zeros(1000, 28, 28), workload.model().eval()
    return_free_memory()
    before_bytes = process_bytes()
    assert reset_process_peak()
    assert begin_watching_allocations()
    with torch.no_grad():
        model(batch)
    held_bytes = allocated_bytes = batch.nbytes
    for num_bytes in end_watching_allocations():
        held_bytes += num_bytes
        allocated_bytes = max(allocated_bytes, held_bytes)
    resident_bytes = batch.nbytes + process_peak_bytes() - before_bytes
    assert resident_bytes <= evaluation_bytes(trace, trace.steps[0], batch=len(batch)) <= allocated_bytes


class _LastOf(nn.Module):
    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.layer(data)[0][:, -1]  # type: ignore[no-any-return]


def test_an_evaluation_without_autocast_holds_larger_copies_within_convolutions() -> None:
    """GIVEN convolutions under autocast WHEN an evaluation is foreseen without THEN its forward holds no more."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().mean()

    model = nn.Sequential(*(nn.Conv2d(24, 24, 3, 1, 1, bias=False) for _ in range(3)))
    workload = memwall.Workload(
        model=lambda: model,
        batch=lambda: torch.zeros(64, 24, 48, 48),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = msgspec.structs.replace(memwall.record(workload, num_steps=1), base_bytes=0, workspace_bytes=0)
    foreseen = evaluation_bytes(trace, trace.steps[0], batch=64, may_lack_autocast=True)
    assert begin_watching_allocations()
    with torch.no_grad():
        model(torch.zeros(64, 24, 48, 48))
    live, most = 0, 0
    for num_bytes in end_watching_allocations():
        live += num_bytes
        most = max(most, live)
    assert most <= foreseen <= 1.2 * most
