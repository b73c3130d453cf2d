"""Arguments that decide what the Trainer trains: models built anew, compiled models, batch sizes to be found."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_runs import arguments

from memwall.planning.techniques.accumulate import Accumulate

pytestmark = [pytest.mark.requires("transformers", "accelerate"), pytest.mark.slow]

MIB = 1 << 20


def test_a_model_that_the_trainer_builds_is_planned(build: Any, make_model: Any, digest: Any) -> None:
    from memwall.integrations.trainer import MemwallCallback

    plain = build(None, model_init=make_model)
    plain.train()
    callback = MemwallCallback(budget="1TiB")
    trainer = build(callback, model_init=make_model)
    trainer.train()
    assert digest(trainer.model) == digest(plain.model)
    assert callback.session.plan is not None
    first = callback.session
    trainer.train()
    assert callback.session is not first, "each train() builds a model, and has a session of its own"
    assert callback.session.plan is not None


class Tiny(nn.Module):
    """Is a model as the Trainer wants it, which takes the compiler no time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.embedding(input_ids)).mT, labels)}


def test_a_model_that_the_trainer_compiles_is_planned(digest: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    args = arguments(TrainingArguments, torch_compile=True, torch_compile_backend="aot_eager")
    plain = Trainer(model=Tiny(), args=args, train_dataset=rows)
    plain.train()
    torch._dynamo.reset()
    callback = MemwallCallback(budget="1TiB")
    trainer = Trainer(model=Tiny(), args=args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert digest(trainer.model) == digest(plain.model)
    assert callback.session.trace.modules[0].class_name == "OptimizedModule"
    assert callback.session.measured.num_steps == 3


class _Ignores:
    """Computes a mean of its own, whatever it is told."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss


class _Declares:
    """Says what its loss is, as TRL's trainers do."""

    loss_is_scaled_for_ga = False


class _Passes:
    """Leaves the loss to the Trainer."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_Ignores, "Subclass.compute_loss does not use num_items_in_batch, so that the losses of its parts cannot be"),
        (_Declares, "Subclass takes the mean over the samples of each batch, so that the losses of its parts cannot"),
        (_Passes, ""),
    ],
)
def test_batches_are_divided_only_where_the_losses_of_their_parts_add_up(
    kind: type, said: str, samples: Any, make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    subclass = type("Subclass", (kind, Trainer), {})
    args = arguments(TrainingArguments, max_steps=1, per_device_train_batch_size=1, auto_find_batch_size=True)
    subclass(model=make_model(), args=args, train_dataset=samples, callbacks=[MemwallCallback(budget="1TiB")]).train()
    assert said in caplog.text
    assert ("auto_find_batch_size" in caplog.text) == bool(said)


def test_auto_find_batch_size_is_answered_by_the_plan(train: Any, budget_relative_to: Any) -> None:
    """GIVEN a budget that whole batches do not fit WHEN the batch size is to be found THEN the plan divides batches."""
    from memwall.integrations.trainer import MemwallCallback

    plain = train(None)
    budget_relative_to("smallest", -5 * MIB)
    callback = MemwallCallback(budget="1TiB")
    trainer = train(callback, auto_find_batch_size=True)
    (accumulate,) = [action for action in callback.session.plan.actions if isinstance(action, Accumulate)]
    assert accumulate.num_micro_batches > 1
    assert trainer.state.global_step == plain.state.global_step
    for found, expected in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
