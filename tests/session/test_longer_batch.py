"""A batch that is larger than the recorded one, and has no room under its plan, is recorded before its forward."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_bytes, return_free_memory
from memwall.session.loop.longer_batch import Shape, input_shape, is_too_large
from memwall.trace.operator_arguments import tensors_among

MIB = 1 << 20


def too_large(
    shape: Shape, *, held: int = 200, budget: int | None = 250, recorded: Shape = (8, 64), margin: int = 0
) -> bool:
    """Tells so of a plan that holds so many MiB, of which the process has 100 before the step, and the model 20."""
    standing = SimpleNamespace(nbytes=20 * MIB, category="parameter")
    trace = SimpleNamespace(
        device="cpu", input_shape=recorded, base_bytes=100 * MIB, steps=(SimpleNamespace(storages=(standing,)),)
    )
    budget_bytes = None if budget is None else budget * MIB
    forecast = SimpleNamespace(budget_bytes=budget_bytes, margin_bytes=margin * MIB, steady_process_bytes=held * MIB)
    return is_too_large(shape, cast(Any, trace), cast(Any, SimpleNamespace(forecast=forecast)))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 64), False),
        ((4, 256), True),  # what attention holds grows with the square
        ((12, 64), False),  # 80 MiB become 120
        ((14, 64), True),
        ((8, 80), False),
        ((8, 96), True),
        ((8, 3, 64), False),  # not to be compared
        ((), False),
    ],
)
def test_growth_is_foreseen_from_the_first_tensors_shape(shape: Shape, expected: bool) -> None:
    assert too_large(shape) == expected


def test_without_a_budget_or_a_recorded_shape_nothing_is_too_large() -> None:
    assert not too_large((80, 64), budget=None)
    assert not too_large((80, 64), recorded=())


def test_half_of_the_margin_is_left() -> None:
    assert not too_large((8, 70), held=225)
    assert too_large((8, 70), held=225, margin=16)


def test_the_first_tensor_with_dimensions_is_the_input() -> None:
    assert input_shape((torch.tensor(1),), {"ids": {"a": torch.ones(2, 3)}}) == (2, 3)
    assert input_shape((1, "a"), {}) == ()


def test_images_of_several_sizes_count_as_what_they_are_padded_to() -> None:
    images = [torch.ones(3, 4, 9), torch.ones(3, 7, 5)]
    assert input_shape((images, [{"boxes": torch.ones(2, 4)}]), {}) == (2, 3, 7, 9)
    assert input_shape((), {"images": tuple(images)}) == (2, 3, 7, 9)
    assert input_shape((images[:1],), {}) == (3, 4, 9)
    assert input_shape(([torch.ones(3, 4, 9)] * 2,), {}) == (2, 3, 4, 9)
    assert input_shape(([torch.ones(2), torch.ones(2, 2)],), {}) == (2,)
    assert input_shape(([torch.ones(8, 128, dtype=torch.long)] * 2,), {}) == (8, 128)  # tokens, and their mask


def test_fields_of_a_batch_without_a_dictionary_are_looked_at() -> None:
    @dataclass(slots=True)
    class Batch:
        name: str
        tokens: torch.Tensor

    assert input_shape((Batch("train", torch.ones(4, 5)),), {}) == (4, 5)
    assert [tensor.shape for tensor in tensors_among((Batch("train", torch.ones(4, 5)),), [])] == [(4, 5)]


class Detector(nn.Module):
    """Is called with a list of images, here of one dimension, and pads them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(nn.utils.rnn.pad_sequence(images, batch_first=True))


@pytest.mark.slow
def test_a_batch_with_a_larger_image_is_recorded_before_its_forward() -> None:
    """GIVEN a list of images WHEN another one than the first is larger than those before THEN the step is recorded."""
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    held_bytes = process_bytes()
    states: list[str] = []
    with memwall.fit(model, optimizer, budget=held_bytes + 220 * MIB) as session:
        for size in (64, 64, 1024, 64):
            loss = model([torch.ones(64, 256), torch.ones(size, 256)]).square().mean()
            states.append(session.state)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert states == ["recording", "running", "recording", "running"]
    assert session.trace is not None
    assert session.trace.micro_batch == 2  # images, not rows of the first one


@pytest.mark.slow
def test_a_longer_batch_is_recorded_before_its_forward_where_the_plan_has_no_room() -> None:
    """GIVEN a budget with room for the recorded batch WHEN a larger one comes THEN it is recorded, once."""
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    held_bytes = process_bytes()
    states: list[str] = []
    with memwall.fit(model, optimizer, budget=held_bytes + 220 * MIB) as session:
        for size in (64, 64, 2048, 64, 2048):
            loss = model(torch.ones(size, 256)).square().mean()
            states.append(session.state)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert states == ["recording", "running", "recording", "running", "running"]
    assert session.trace is not None
    assert session.trace.micro_batch == 2048


@pytest.mark.slow
def test_a_refusal_of_a_longer_batch_says_that_it_came() -> None:
    """GIVEN a run that has a plan WHEN a batch comes that no plan has room for THEN its refusal says so."""
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    with (
        memwall.fit(model, optimizer, budget=process_bytes() + 60 * MIB),
        pytest.raises(
            InfeasibleError, match=r"\nthe run has had a plan before: a longer batch came: .* after \[64, 256\]"
        ),
    ):
        train(model, optimizer, (64, 64, 1 << 13, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        model(torch.ones(size, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(budget_mib: int | None, states: list[str]) -> tuple[str, memwall.Session | None]:
    """Trains steps of two batches each, one of which is long, and returns a digest of the weights."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    return_free_memory()
    budget = None if budget_mib is None else process_bytes() + budget_mib * MIB
    with nullcontext() if budget is None else memwall.fit(model, optimizer, budget=budget) as session:
        for sizes in ((64, 64), (64, 64), (64, 2048), (64, 2048), (2048, 64)):
            for size in sizes:
                loss = model(torch.rand(size, 256)).square().mean()
                states.append("" if session is None else session.state)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(), session


@pytest.mark.slow
def test_a_step_is_recorded_from_a_longer_batch_on_that_adds_to_its_gradients() -> None:
    """GIVEN a plan for short batches WHEN a step's second one is long THEN it is recorded, once, and adds up."""
    states: list[str] = []
    digest, session = accumulated(220, states)
    assert states == ["recording"] * 2 + ["running"] * 3 + ["recording"] + ["running"] * 4
    assert session is not None
    assert session.trace is not None
    assert session.trace.num_micro_batches == 2  # so that no plan lets go of gradients in a backward
    assert session.measured.overall_peak_bytes <= session.budget_bytes
    assert digest == accumulated(None, [])[0]


@pytest.mark.slow
def test_a_step_goes_on_where_an_earlier_forward_of_it_waits_for_its_backward() -> None:
    """GIVEN steps of two forwards and one backward WHEN the second is long THEN no part of it alone is recorded."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    states: list[str] = []
    with memwall.fit(model, optimizer, budget=process_bytes() + 100 * MIB) as session:
        for size in (64, 64, 4096):
            losses = []
            for each in (64, size):
                losses.append(model(torch.ones(each, 256)).square().mean())
                states.append(session.state)
            sum(losses, torch.zeros(())).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert states == ["recording"] * 2 + ["running"] * 4
