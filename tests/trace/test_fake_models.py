"""Making a model on fake tensors: what its constructor does with values it must not miss."""

import copy
from collections.abc import Callable

import pytest
import torch
from fake_steps import record_fake
from torch import Tensor, nn

from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


def workload_of(model: Callable[[], nn.Module], batch: Callable[[], Tensor]) -> Workload:
    return Workload(
        model=model,
        batch=batch,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def peaks_bytes(trace: Trace) -> list[int]:
    return [live_peak_bytes(step, "cpu") for step in trace.steps]


def encoder() -> nn.Module:
    """Its layers are deep copies of one."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 2)


def copied_convolution() -> nn.Module:
    """With buffers made from values, as the count of batches is."""
    return copy.deepcopy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))


@pytest.mark.parametrize(
    ("model", "shape"), [(encoder, (2, 16, WIDTH)), (copied_convolution, (2, 3, 16, 16))], ids=["encoder", "batch norm"]
)
def test_a_model_made_of_deep_copies_is_the_live_one(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    workload = workload_of(model, lambda: torch.ones(shape))
    fake, live = record_fake(workload, has_cpu_workspaces=True), record(workload)
    assert peaks_bytes(fake) == pytest.approx(peaks_bytes(live), rel=0.001)
    assert fake.model_fingerprint == live.model_fingerprint


def test_a_deep_copy_has_a_storage_of_its_own_shares_what_was_shared_and_keeps_attributes() -> None:
    found: list[nn.Module] = []

    def model() -> nn.Module:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        first.weight.rank = 3  # type: ignore[attr-defined]
        made = nn.Sequential(first, second)
        found[:] = [made, copy.deepcopy(made)]
        return found[1]

    record_fake(workload_of(model, lambda: torch.ones(2, WIDTH)))
    original, copied = (layers[0].weight for layers in found)
    assert copied is found[1][1].weight
    assert isinstance(copied, nn.Parameter)
    assert copied.requires_grad
    assert copied.rank == 3
    assert copied.untyped_storage()._cdata != original.untyped_storage()._cdata


def test_afterwards_torch_copies_as_before() -> None:
    before = torch._subclasses.fake_tensor.FakeTensor.__deepcopy__
    sampled = torch.nn.init._no_grad_trunc_normal_
    record_fake(workload_of(copied_convolution, lambda: torch.ones(2, 3, 16, 16)))
    assert torch._subclasses.fake_tensor.FakeTensor.__deepcopy__ is before
    assert torch.nn.init._no_grad_trunc_normal_ is sampled


def test_weights_drawn_until_they_are_within_bounds_take_no_values() -> None:
    def model() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        return layer

    workload = workload_of(model, lambda: torch.ones(2, WIDTH))
    assert peaks_bytes(record_fake(workload)) == peaks_bytes(record(workload))
