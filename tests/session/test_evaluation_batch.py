"""The largest batch that a script is going to evaluate, as its data loaders that are alive say it."""

import gc
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memwall
from memwall.predict.evaluation import evaluation_bytes
from memwall.predict.first_step import FirstStep
from memwall.session.loop import evaluation_batch
from memwall.session.loop.evaluation_batch import largest_batch, with_evaluation

TRAINED = 7919  # of no other loader in the process


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


def test_what_two_runs_measure_apart_does_not_grow_with_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN runs that measured a MiB of workspace more or less WHEN one is told a budget THEN the other has room."""
    workload = memwall.Workload(
        model=lambda: nn.Linear(64, 64),
        batch=lambda: torch.zeros(TRAINED, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = memwall.record(workload, num_steps=1)
    larger = msgspec.structs.replace(trace, workspace_bytes=trace.workspace_bytes + (1 << 20))
    monkeypatch.setattr(evaluation_batch, "largest_batch", lambda _: 16 * TRAINED)
    first = FirstStep(needed_bytes=0, in_memory_bytes=0, stays_from_bytes=0)
    told, again = with_evaluation(first, trace), with_evaluation(first, larger)
    assert told.needed_bytes == told.evaluation_bytes
    assert again.evaluation_bytes == told.evaluation_bytes + (1 << 20)


def test_an_evaluation_comes_after_what_planning_left() -> None:
    first = FirstStep(needed_bytes=300, in_memory_bytes=0, stays_from_bytes=0, evaluation_batch=9, evaluation_bytes=280)
    assert first.grown_by(10).evaluation_bytes == 290
    assert first.grown_by(10).needed_bytes == 300
    assert first.grown_by(50).needed_bytes == 330
    assert FirstStep(needed_bytes=300, in_memory_bytes=0, stays_from_bytes=0).grown_by(50).needed_bytes == 300


def trained_on(taken_from: torch.Tensor | None) -> memwall.Trace:
    """Returns the trace of a step of a linear layer, whose 32 samples are a part of a tensor, or one of their own."""
    workload = memwall.Workload(
        model=lambda: nn.Linear(64, 64),
        batch=lambda: torch.zeros(32, 64) if taken_from is None else taken_from[:32],
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return memwall.record(workload, num_steps=1)


@pytest.mark.parametrize(
    ("evaluated", "batch"),
    [
        pytest.param((320, 64), 320, id="ten times the samples"),
        pytest.param((32, 128), 64, id="samples twice as long count twice"),
        pytest.param((32, 64), 0, id="no more than a step has"),
        pytest.param((320, 8, 8), 0, id="of another kind"),
        pytest.param((), 0, id="none begins"),
    ],
)
def test_an_evaluation_that_begins_says_how_many_samples_it_has(evaluated: tuple[int, ...], batch: int) -> None:
    first = FirstStep(needed_bytes=0, in_memory_bytes=0, stays_from_bytes=0)
    assert with_evaluation(first, trained_on(None), evaluated).evaluation_batch == batch


def test_samples_that_the_script_holds_all_at_once_do_not_grow_with_the_evaluation() -> None:
    """GIVEN a batch of its own, or part of a tensor WHEN more is evaluated THEN of this the outputs alone are more."""
    sample_bytes = 64 * 4
    evaluated = {}
    for name, trace in (("own", trained_on(None)), ("part", trained_on(torch.zeros(4096, 64)))):
        small, large = (evaluation_bytes(trace, batch=size) for size in (32, 2048))
        evaluated[name] = large - small
    assert evaluated == {"own": 2 * 2016 * sample_bytes, "part": 2016 * sample_bytes}
