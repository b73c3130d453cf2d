"""The largest batch that a script is going to evaluate, as its data loaders that are alive say it."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import memwall
from memwall.predict.evaluation import evaluation_bytes
from memwall.predict.first_step import FirstStep
from memwall.session.loop.evaluation_batch import (
    largest_batch,
    with_average,
    with_earlier,
    with_evaluation,
)
from memwall.session.loop.longer_batch import Shape
from memwall.session.session import Session

TRAINED = 7919  # of no other loader in the process
FIRST = FirstStep(needed_bytes=0, in_memory_bytes=0, stays_from_bytes=0)


@pytest.fixture(autouse=True)
def no_other_loaders() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


def loader(batch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(4 * TRAINED * 4)), batch_size=batch)


def test_a_loader_with_larger_batches_is_going_to_be_evaluated() -> None:
    training, evaluation = loader(TRAINED), loader(2 * TRAINED)
    for _ in training:
        assert largest_batch(TRAINED) == evaluation.batch_size
        break


def test_a_loader_that_is_trained_from_in_parts_is_no_evaluation() -> None:
    """GIVEN an evaluation in batches as large as a part WHEN larger ones are iterated THEN they are the training's."""
    evaluation, training = loader(TRAINED), loader(4 * TRAINED)
    for (batch,) in training:
        assert len(batch) // 4 == evaluation.batch_size
        assert largest_batch(TRAINED) == 0
        larger = loader(3 * TRAINED)
        assert largest_batch(TRAINED) == larger.batch_size
        break


def test_a_batch_has_at_most_all_samples_of_its_data() -> None:
    training, evaluation = loader(TRAINED), loader(1 << 30)
    assert training.batch_size == TRAINED
    assert largest_batch(TRAINED) == len(evaluation.sampler) == 16 * TRAINED  # type: ignore[arg-type]


def test_where_no_loader_has_what_is_trained_none_says_anything() -> None:
    assert loader(2 * TRAINED).batch_size
    assert largest_batch(TRAINED) == 0


def trained_on(taken_from: torch.Tensor | None, *, under_autocast: bool = False) -> memwall.Trace:
    """Returns the trace of a step of a linear layer, whose 32 samples are a part of a tensor, or one of their own."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
            return model(batch).sum()

    workload = memwall.Workload(
        model=lambda: nn.Linear(64, 64),
        batch=lambda: torch.zeros(32, 64) if taken_from is None else taken_from[:32],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return memwall.record(workload, num_steps=1)


@pytest.mark.parametrize(
    ("evaluated", "batch"),
    [
        pytest.param((320, 64), 320, id="ten times the samples"),
        pytest.param((32, 128), 64, id="samples twice as long count twice"),
        pytest.param((8, 64), 8, id="fewer than a step has"),
        pytest.param((320, 8, 8), 32, id="of another kind, as many as a step has"),
    ],
)
def test_an_evaluation_that_begins_says_how_many_samples_it_has(evaluated: tuple[int, ...], batch: int) -> None:
    known = with_evaluation(FIRST, trained_on(None), nn.Linear(64, 64), evaluated)
    assert known.evaluation_batch == batch
    assert with_evaluation(known, trained_on(None), nn.Linear(64, 64), (4, 64)) is known


@pytest.mark.parametrize(("evaluated", "batch"), [((320, 64), 320), ((32, 64), 0), ((8, 64), 0), ((), 0)])
def test_an_evaluation_from_before_the_first_step_counts_if_it_is_larger(evaluated: Shape, batch: int) -> None:
    assert with_earlier(FIRST, trained_on(None), nn.Linear(64, 64), evaluated).evaluation_batch == batch


_CALLS = {
    "all samples": ("with torch.no_grad():\n    found = net(all_samples).argmax(1)", 320, 1.0),
    "in a function": ("@torch.inference_mode()\ndef accuracy():\n    return net(all_samples)", 320, 1.0),
    "of an object": ("with no_grad():\n    net(holder.samples)", 64, 1.0),
    "a graph": ("with torch.no_grad():\n    net(all_samples, edges)", 320, 50.0),
    "a part": ("with torch.no_grad():\n    net(all_samples[:64])", 0, 1.0),
    "with gradients": ("found = net(all_samples)", 0, 1.0),
    "another model": ("with torch.no_grad():\n    other(all_samples)", 0, 1.0),
    "as many as a step has": ("with torch.no_grad():\n    net(few)", 0, 1.0),
    "of another length": ("with torch.no_grad():\n    net(longer)", 0, 1.0),
}


@pytest.mark.parametrize("name", _CALLS)
def test_the_text_says_what_is_evaluated_as_a_whole(name: str, tmp_path: Path) -> None:
    """GIVEN a script that evaluates what a name stands for WHEN a plan is made THEN as much as it stands for counts."""
    text, batch, growth = _CALLS[name]
    net, other, edges = nn.Linear(64, 64), nn.Linear(64, 64), torch.zeros(2, 5000)
    all_samples, few, longer = torch.zeros(320, 64), torch.zeros(32, 64), torch.zeros(320, 65)
    holder = SimpleNamespace(samples=all_samples[:64])
    trace, recorded = trained_on(None), ((32, 64), (2, 100)) if "edges" in text else ((32, 64),)
    asks = "from memwall.session.loop.evaluation_batch import with_called\n"
    answers = "def known_here(*given):\n    return with_called(*given)\n"
    path = tmp_path / "evaluating_script.py"
    path.write_text(f"{asks}{answers}{text}\n")
    found: dict[str, Any] = {}
    exec(compile(asks + answers, str(path), "exec"), found)
    known = found["known_here"](FIRST, trace, net, recorded)
    assert (known.called_batch, known.called_growth) == (batch, growth)
    del other, edges, few, longer, holder


def test_what_does_not_grow_with_the_samples_may_grow_otherwise() -> None:
    """GIVEN a tensor that a step makes WHEN one like it is ten times as large in an evaluation THEN it counts so."""
    workload = memwall.Workload(
        model=lambda: Edges(),
        batch=lambda: torch.zeros(32, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = memwall.record(workload, num_steps=1)
    alike, grown = (evaluation_bytes(trace, trace.steps[0], batch=32, growth=growth) for growth in (1.0, 10.0))
    assert grown - alike == 9 * (4096 * 4 + 4)  # and its sum


class Edges(nn.Module):
    """Makes a tensor that no number of samples says the size of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.weight + torch.zeros(4096).sum()


def test_gradients_that_are_there_as_an_evaluation_begins_stay_for_it() -> None:
    model = nn.Linear(64, 64)
    assert not with_evaluation(FIRST, trained_on(None), model, (32, 64)).evaluates_with_gradients
    model(torch.zeros(1, 64)).sum().backward()
    assert with_evaluation(FIRST, trained_on(None), model, (32, 64)).evaluates_with_gradients


@pytest.mark.parametrize(
    ("kind", "has_average"),
    [("a copy", True), ("AveragedModel", True), ("a wrapper", False), ("another form", False), ("none", False)],
)
def test_an_average_of_weights_is_another_model_of_the_same_form(kind: str, has_average: bool) -> None:
    model = nn.Sequential(nn.Linear(7, 919), nn.Linear(919, 3))
    others = {
        "a copy": lambda: copy.deepcopy(model).requires_grad_(False),
        "AveragedModel": lambda: AveragedModel(model),
        "a wrapper": lambda: nn.Sequential(*model),
        "another form": lambda: nn.Sequential(nn.Linear(7, 919), nn.Linear(919, 4)),
        "none": lambda: None,
    }
    other = others[kind]()
    assert with_average(FIRST, trained_on(None, under_autocast=True), model).has_average == has_average
    assert not with_average(FIRST, trained_on(None), model).has_average  # nothing would be in another precision
    del other


def test_samples_that_the_script_holds_all_at_once_do_not_grow_with_the_evaluation() -> None:
    """GIVEN a batch of its own, or part of a tensor WHEN more is evaluated THEN of this the outputs alone are more."""
    sample_bytes = 64 * 4
    evaluated = {}
    for name, trace in (("own", trained_on(None)), ("part", trained_on(torch.zeros(4096, 64)))):
        small, large = (evaluation_bytes(trace, trace.steps[0], batch=size) for size in (32, 2048))
        evaluated[name] = large - small
    assert evaluated == {"own": 2 * 2016 * sample_bytes, "part": 2016 * sample_bytes}


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_run_knows_whether_there_is_an_average_once_its_first_step_has_ended(has_copy: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 937), nn.Linear(937, 64))
    average = copy.deepcopy(model) if has_copy else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(budget_bytes=1 << 40)
    session.attach(model, optimizer)
    with session:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        first = session._live.settings.first_step
    assert first is not None
    assert first.has_average == has_copy
    del average
