"""The largest batch that a script is going to evaluate, as its data loaders that are alive say it."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from memwall.session.loop.evaluation_batch import largest_batch

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
