"""A sample that is longer than the step a plan was made from is named before the second step."""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memwall.integrations.data_lengths import LongestSample, longest_sample

pytestmark = pytest.mark.requires("transformers", "accelerate")

LENGTH, OUTLIER, PLACE = 16, 64, 50


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Trainer makes its output folder where it is run."""
    with contextlib.chdir(tmp_path_factory.mktemp("trainer")):
        yield


def data(*, outlier_at: int | None) -> list[dict[str, Any]]:
    """Samples of one length, but for one."""
    lengths = [OUTLIER if place == outlier_at else LENGTH for place in range(60)]
    return [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in lengths]


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as long as its longest sample."""
    return {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in ("input_ids", "labels")
    }


def warnings_after_the_first_step(make_model: Any, samples: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    found: list[str] = []

    class Second(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                found.extend(record.getMessage() for record in caplog.records if "a sample; sample" in record.msg)

    args = TrainingArguments(
        "unused",
        per_device_train_batch_size=1,
        max_steps=2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    callbacks = [MemwallCallback(budget="64GiB"), Second()]
    with caplog.at_level(logging.WARNING, "memwall"):
        Trainer(model=make_model(), args=args, train_dataset=samples, data_collator=padded, callbacks=callbacks).train()
    return found


@pytest.mark.slow
def test_an_outlier_at_step_50_is_named_before_step_2(make_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = warnings_after_the_first_step(make_model, data(outlier_at=PLACE - 1), caplog)
    assert found == [
        "the plan was made from batches of 16 tokens a sample; sample 50 of 60 has 64, at least 4.0 times as many, and "
        "the step it comes in will need more memory than foreseen. Group the samples by length, which puts the longest "
        "batch first, or cut them"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("outlier_at", [None, 0], ids=["none", "first"])
def test_a_plan_made_from_the_longest_batch_says_nothing(
    outlier_at: int | None, make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_after_the_first_step(make_model, data(outlier_at=outlier_at), caplog) == []


def test_reading_takes_no_longer_than_allowed_and_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN samples of 10 ms each, on a clock of its own WHEN 55 ms are allowed THEN it ends with the sixth."""
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr("memwall.integrations.data_lengths.time", clock)

    class Slow:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> dict[str, Any]:
            clock.seconds += 0.01
            return {"input_ids": [1] * (index + 1)}

    found = longest_sample(Slow(), most_seconds=0.055)
    assert found == LongestSample(length=6, number=6, num_read=6, num_samples=1000)


def test_data_without_tokens_or_without_places_are_left_alone() -> None:
    assert longest_sample([{"pixel_values": torch.ones(3)}]) is None
    assert longest_sample(iter(data(outlier_at=0))) is None
    assert longest_sample(None) is None
    assert longest_sample([]) is None
    assert longest_sample([{"input_ids": [1, 2]}, {"input_ids": [1]}]) == LongestSample(
        length=2, number=1, num_read=2, num_samples=2
    )


@pytest.mark.requires("datasets")
def test_a_data_set_of_hugging_face_is_read_by_its_column() -> None:
    datasets = importlib.import_module("datasets")
    rows = {"input_ids": [[1] * n for n in (3, 7, 5)], "text": ["a", "b", "c"]}
    found = longest_sample(datasets.Dataset.from_dict(rows))
    assert found == LongestSample(length=7, number=2, num_read=3, num_samples=3)
