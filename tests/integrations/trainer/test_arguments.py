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
