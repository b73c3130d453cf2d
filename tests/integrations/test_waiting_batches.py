"""What transformers' Trainer keeps of the batches it has fetched: the ground of `memwall.predict.phases`."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.requires("transformers", "accelerate")

ACCUMULATED, NUM_STEPS = 3, 2


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Trainer makes its output folder where it is run."""
    with contextlib.chdir(tmp_path_factory.mktemp("trainer")):
        yield


def test_the_batches_of_all_micro_batches_are_there_throughout(make_model: Any) -> None:
    """GIVEN steps of three micro-batches THEN each forward, and an evaluation between steps, finds all three alive.

    The one batch more is the next one, which accelerate has fetched and not yet moved to the device.
    """
    from transformers import Trainer, TrainingArguments

    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[tuple[bool, int]] = []

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([sample["input_ids"] for sample in samples])
        if tokens.shape[0] == 2:  # evaluated are single samples
            made.append(weakref.ref(tokens))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def count(module: torch.nn.Module, *_: Any) -> None:
        alive.append((module.training, sum(reference() is not None for reference in made)))

    model = make_model()
    model.register_forward_pre_hook(count)
    samples = [{"input_ids": torch.full((8,), number)} for number in range(2 * ACCUMULATED * NUM_STEPS)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="unused",
            num_train_epochs=1,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=ACCUMULATED,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=collate,
        train_dataset=samples,
        eval_dataset=samples[:1],
    )
    trainer.train()
    first, last = ACCUMULATED + 1, ACCUMULATED
    assert len(made) == ACCUMULATED * NUM_STEPS
    assert [number for is_training, number in alive if is_training] == [first] * ACCUMULATED + [last] * ACCUMULATED
    assert [number for is_training, number in alive if not is_training] == [first, last]
