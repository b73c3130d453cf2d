"""What the Trainer callback refuses and why, and the arguments that would do."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from trainer_runs import MIB, arguments, with_actions

from memwall.errors import InfeasibleError, IntegrationError, PlanError
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.recompute import Recompute

pytestmark = [pytest.mark.requires("transformers", "accelerate"), pytest.mark.slow]


class TestInfeasible:
    def test_names_the_arguments_that_would_fit(self, train: Any, budget_relative_to: Any):
        from memwall.integrations.trainer import MemwallCallback

        budget_relative_to("smallest", 30 * MIB)
        callback = MemwallCallback(budget="1TiB")
        with pytest.raises(InfeasibleError) as caught:
            train(callback)
        found = re.search(
            r"\n  - set TrainingArguments\(per_device_train_batch_size=(\d+), gradient_accumulation_steps=(\d+)\): "
            r"the same global batch, and it fits$",
            str(caught.value),
        )
        assert found is not None, str(caught.value)
        size, number = map(int, found.groups())
        assert (size * number, number > 1) == (16, True)
        assert callback.session.state == "closed"
        assert caught.value.relaxations[0] in str(caught.value)

    def test_is_left_as_it_is_where_no_argument_helps(self, train: Any, budget_relative_to: Any):
        from memwall.integrations.trainer import MemwallCallback

        budget_relative_to("smallest", 300 * MIB)
        with pytest.raises(InfeasibleError, match=r"cannot be met: the smallest feasible one is") as caught:
            train(MemwallCallback(budget="1TiB"))
        assert "TrainingArguments(" not in str(caught.value)

    def test_counts_a_sample_of_two_rows_once(self, monkeypatch: pytest.MonkeyPatch):
        from memwall.integrations import trainer

        trace = SimpleNamespace(micro_batch=8)
        found = SimpleNamespace(batch_parts=(2, 4), micro_batch=8, num_micro_batches=1)
        monkeypatch.setattr(trainer, "make_plan", lambda *_: found)
        callback = trainer.MemwallCallback(budget="1GiB")
        callback.session = SimpleNamespace(trace=trace)
        refused = InfeasibleError("too small", budget_bytes=MIB, smallest_feasible_bytes=2 * MIB)
        told = callback._with_arguments(refused, SimpleNamespace(per_device_train_batch_size=4))
        assert "(per_device_train_batch_size=1, gradient_accumulation_steps=4)" in str(told)
        found.batch_parts = (1, 8)
        assert callback._with_arguments(refused, SimpleNamespace(per_device_train_batch_size=4)) is refused


class TestRefusals:
    def refused(self, build: Any, callback: Any, **settings: Any) -> str:
        with pytest.raises(IntegrationError) as caught:
            build(callback, **settings)
        return str(caught.value)

    def test_a_callback_added_later(self, build: Any):
        from memwall.integrations.trainer import MemwallCallback

        trainer = build(None)
        trainer.add_callback(MemwallCallback(budget="1TiB"))
        with pytest.raises(IntegrationError) as caught:
            trainer.train()
        assert str(caught.value) == (
            "MemwallCallback was added to a Trainer that was already built; its model may be wrapped by now. "
            "Pass it when building: Trainer(..., callbacks=[MemwallCallback(...)])"
        )

    def test_micro_batches_that_are_not_the_plans(self, build: Any, plan: Plan):
        from memwall.integrations.trainer import MemwallCallback

        split = with_actions(plan, [Accumulate(micro_batch=4, num_micro_batches=4)])
        assert self.refused(build, MemwallCallback(plan=split), per_device_train_batch_size=16) == (
            "the plan needs TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=4), "
            "found per_device_train_batch_size=16, gradient_accumulation_steps=1; "
            "args = plan.training_arguments(args) sets them"
        )

    def test_a_precision_that_is_not_the_plans(self, build: Any, plan: Plan):
        from memwall.integrations.trainer import MemwallCallback

        lower = with_actions(plan, [Autocast(dtype="bfloat16")])
        assert self.refused(build, MemwallCallback(plan=lower)) == (
            "the plan needs TrainingArguments(bf16=True), found bf16=False; "
            "args = plan.training_arguments(args) sets them"
        )

    def test_a_plan_for_another_model(self, build: Any, plan: Plan):
        from memwall.integrations.trainer import MemwallCallback

        other = msgspec.structs.replace(plan, model_fingerprint="0" * 64)
        with pytest.raises(PlanError, match=r"the plan was made for another model: it names 000000000000, this Llama"):
            build(MemwallCallback(plan=other))

    def test_a_batch_larger_than_the_plans_is_warned_of(self, build: Any, plan: Plan, caplog: Any):
        from memwall.integrations.trainer import MemwallCallback

        with caplog.at_level(logging.WARNING, logger="memwall.integrations.trainer"):
            build(MemwallCallback(plan=plan), per_device_train_batch_size=32)
        assert caplog.messages == [
            "the plan was made for micro-batches of 16 samples, per_device_train_batch_size is 32: "
            "its forecast does not hold; make a plan for this batch"
        ]


class TestTrainingArguments:
    def test_a_subclass_and_its_values_survive(self, plan: Plan):
        from transformers import Seq2SeqTrainingArguments

        args = arguments(
            Seq2SeqTrainingArguments,
            generation_max_length=17,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            optim="sgd",
            learning_rate=0.25,
        )
        both = with_actions(plan, [Autocast(dtype="bfloat16"), Accumulate(micro_batch=4, num_micro_batches=2)])
        changed = both.training_arguments(args)
        changes = {"bf16": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        assert type(changed) is Seq2SeqTrainingArguments
        assert changed.to_dict() == {**args.to_dict(), **changes}
        assert args.gradient_accumulation_steps == 1, "the given arguments stay as they are"

    @pytest.mark.parametrize(
        ("actions", "settings"),
        [
            ((Accumulate(micro_batch=4, num_micro_batches=4),), {"gradient_accumulation_steps": 4}),
            ((Autocast(dtype="bfloat16"),), {"per_device_train_batch_size": 16, "bf16": True}),
        ],
    )
    def test_they_are_what_the_callback_wants(
        self, train: Any, digest: Any, plan: Plan, actions: tuple[Action, ...], settings: dict[str, Any]
    ):
        from transformers import TrainingArguments

        from memwall.integrations.trainer import MemwallCallback

        whole = with_actions(plan, (*actions, *(a for a in plan.actions if isinstance(a, Recompute))))
        args = arguments(TrainingArguments, per_device_train_batch_size=16, max_steps=2)
        callback = MemwallCallback(plan=whole)
        trainer = train(callback, args=whole.training_arguments(args))
        assert callback.session.measured.num_steps == 2
        plain = train(**{"per_device_train_batch_size": 4, "max_steps": 2, **settings})
        assert digest(trainer.model) == digest(plain.model)
