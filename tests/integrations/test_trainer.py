"""The Trainer callback: plans under a budget, applies a plan, trains to the same bits, refuses what cannot work."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memwall.errors import InfeasibleError, IntegrationError, PlanError
from memwall.plan.actions import Accumulate, Action, Autocast, Recompute
from memwall.plan.planfile import Plan
from memwall.plan.search import Settings, make_plan

pytestmark = pytest.mark.requires("transformers", "accelerate")

MIB = 1 << 20
NUM_STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Trainer makes its output folder where it is run."""
    with contextlib.chdir(tmp_path_factory.mktemp("trainer")):
        yield


@pytest.fixture(scope="module")
def train(make_model: Any, samples: Any) -> Callable[..., Any]:
    """Trains the model for three steps; returns the Trainer."""
    from transformers import Trainer, TrainingArguments

    def run(callback: Any = None, *, args: Any = None, model: Any = None, **settings: Any) -> Any:
        values = {"per_device_train_batch_size": 16, **settings}
        trainer = Trainer(
            model=model if model is not None else make_model(),
            args=args or arguments(TrainingArguments, **values),
            train_dataset=samples,
            eval_dataset=samples[:16],
            callbacks=None if callback is None else [callback],
        )
        trainer.train()
        return trainer

    return run


def arguments(kind: Any, **settings: Any) -> Any:
    """Training arguments that write nothing and talk to nobody."""
    values = {"output_dir": "unused", "max_steps": NUM_STEPS, "save_strategy": "no", "logging_strategy": "no"}
    return kind(**{**values, "report_to": "none", "disable_tqdm": True, "use_cpu": True, **settings})


@dataclass
class Recorded:
    """One run under a budget that needs nothing: what it learned, and plans made from its trace."""

    digest: str
    session: Any

    def plan(self, *, below_plain: int) -> Plan:
        """A plan for a budget so far below the plain peak."""
        plain_bytes = self.session.plan.forecast.plain_peak.process_bytes
        return make_plan(self.session.trace, Settings(budget_bytes=plain_bytes - below_plain))


@pytest.fixture(scope="module")
def recorded(train: Any, digest: Any) -> Recorded:
    from memwall.integrations.trainer import MemwallCallback

    callback = MemwallCallback(budget="1TiB")
    trainer = train(callback)
    return Recorded(digest(trainer.model), callback.session)


@pytest.fixture(scope="module")
def plan(recorded: Recorded) -> Plan:
    """A plan that recomputes layers."""
    found = recorded.plan(below_plain=80 * MIB)
    assert any(isinstance(action, Recompute) for action in found.actions)
    return found


def with_actions(plan: Plan, actions: Sequence[Action]) -> Plan:
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, actions=tuple(actions)))


@pytest.fixture
def budget_relative_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Makes sessions plan for a budget below a peak of their own trace: what a test process holds besides varies."""

    def set_to(peak: str, below: int) -> None:
        def relative(trace: Any, settings: Settings) -> Plan:
            ample = make_plan(trace, settings).forecast
            peaks = {"plain": ample.plain_peak.process_bytes, "smallest": ample.smallest_feasible_budget_bytes}
            return make_plan(trace, msgspec.structs.replace(settings, budget_bytes=peaks[peak] - below))

        monkeypatch.setattr("memwall.apply.planning.make_plan", relative)

    return set_to


@pytest.fixture
def build(make_model: Any, samples: Any) -> Callable[..., Any]:
    """Builds a Trainer without training."""
    from transformers import Trainer, TrainingArguments

    def make(callback: Any, **settings: Any) -> Any:
        kinds = {key: settings.pop(key) for key in ("model_init",) if key in settings}
        args = settings.pop("args", None) or arguments(TrainingArguments, **settings)
        if not kinds:
            kinds["model"] = make_model()
        return Trainer(args=args, train_dataset=samples, callbacks=[callback] if callback else None, **kinds)

    return make


class TestTraining:
    def test_recording_the_first_step_does_not_change_what_is_learned(self, train: Any, digest: Any, recorded: Any):
        assert recorded.digest == digest(train().model)
        assert recorded.session.plan.actions == ()
        assert recorded.session.measured.num_steps == NUM_STEPS

    def test_a_given_plan_recomputes_and_learns_the_same_bits(
        self, train: Any, digest: Any, make_model: Any, recorded: Recorded, plan: Plan, count_calls: Any, caplog: Any
    ):
        from memwall.integrations.trainer import MemwallCallback

        path = next(action.block for action in plan.actions if isinstance(action, Recompute))
        model, callback = make_model(), MemwallCallback(plan=plan)
        calls = count_calls(model.get_submodule(path).mlp)
        with caplog.at_level(logging.INFO, logger="memwall.integrations.trainer"):
            train(callback, model=model)
        assert digest(model) == recorded.digest
        assert len(calls) == 2 * NUM_STEPS
        assert callback.session.state == "closed"
        assert "forward" not in model.get_submodule(path).__dict__
        report = callback.report()
        assert (report.plan_hash, report.measured.steps) == (plan.plan_hash, NUM_STEPS)
        line = (
            rf"memwall: 3 steps \(median \d\.\d+ s\) under {len(plan.actions)} actions; peak .*, foreseen .*, budget .*"
        )
        assert re.fullmatch(line, caplog.messages[-1])

    def test_a_budget_is_planned_for_after_the_first_step(
        self, train: Any, digest: Any, make_model: Any, recorded: Recorded, count_calls: Any, budget_relative_to: Any
    ):
        from memwall.integrations.trainer import MemwallCallback

        budget_relative_to("plain", 80 * MIB)
        model = make_model()
        calls = count_calls(model)
        planned_after: list[int] = []
        callback = MemwallCallback(budget="1TiB")
        watched = type("Watched", (MemwallCallback,), {"on_step_begin": lambda *_, **__: note()})

        def note() -> None:
            if callback.session.state == "running" and not planned_after:
                planned_after.append(len(calls))

        callback.__class__ = watched
        train(callback, model=model)
        assert digest(model) == recorded.digest
        assert callback.session.plan.actions != ()
        assert planned_after == [1]

    def test_accumulation_of_the_trainer_is_one_step(self, train: Any, digest: Any, recorded: Recorded):
        from memwall.integrations.trainer import MemwallCallback

        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
        callback = MemwallCallback(budget="1TiB")
        watched = train(callback, **settings)
        session = callback.session
        assert (session.trace.micro_batch, session.trace.num_micro_batches) == (8, 2)
        assert session.measured.num_steps == 2
        expected = digest(train(**settings).model)
        assert digest(watched.model) == expected
        plain_bytes = session.plan.forecast.plain_peak.process_bytes
        plan = make_plan(session.trace, Settings(budget_bytes=plain_bytes - 40 * MIB))
        assert plan.actions != ()
        assert digest(train(MemwallCallback(plan=plan), **settings).model) == expected

    def test_an_evaluation_after_each_step_is_no_part_of_the_step(self, train: Any, digest: Any, recorded: Recorded):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        trainer = train(callback, eval_strategy="steps", eval_steps=1, eval_on_start=True)
        assert digest(trainer.model) == recorded.digest
        assert "eval" not in [name for name, _ in callback.session.trace.steps[0].marks]
        assert len(callback.session.trace.steps[0].ops) == len(recorded.session.trace.steps[0].ops)
        assert callback.session.measured.num_steps == NUM_STEPS

    def test_checkpointing_that_is_already_on_stays_on(self, train: Any, digest: Any, recorded: Recorded, plan: Plan):
        from memwall.integrations.trainer import MemwallCallback

        settings = {"activation_checkpointing": True, "max_steps": 2}
        expected = digest(train(**settings).model)
        for callback in (MemwallCallback(budget="1TiB"), MemwallCallback(plan=plan)):
            trainer = train(callback, **settings)
            assert digest(trainer.model) == expected
            assert callback.session.measured.num_steps == 2
            assert trainer.model.is_activation_checkpointing

    def test_a_second_train_gets_a_session_of_its_own(self, build: Any):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        trainer = build(callback, max_steps=1)
        sessions = []
        for _ in range(2):
            trainer.train()
            sessions.append(callback.session)
        assert sessions[0] is not sessions[1]
        assert [(s.state, s.measured.num_steps, s.plan is not None) for s in sessions] == [("closed", 1, True)] * 2


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


class TestRefusals:
    def refused(self, build: Any, callback: Any, **settings: Any) -> str:
        with pytest.raises(IntegrationError) as caught:
            build(callback, **settings)
        return str(caught.value)

    def test_auto_find_batch_size(self, build: Any):
        from memwall.integrations.trainer import MemwallCallback

        text = self.refused(build, MemwallCallback(budget="1TiB"), auto_find_batch_size=True)
        assert text == (
            "auto_find_batch_size=True restarts training with another batch size when memory runs out, unseen by "
            "memwall and without adjusting accumulation; set TrainingArguments(auto_find_batch_size=False)"
        )

    def test_torch_compile(self, build: Any):
        from memwall.integrations.trainer import MemwallCallback

        text = self.refused(build, MemwallCallback(budget="1TiB"), torch_compile=True)
        assert text == (
            "torch_compile=True moves saved tensors and recomputation into the compiler, where memwall does not see "
            "them; set TrainingArguments(torch_compile=False)"
        )

    def test_a_model_that_is_built_anew(self, build: Any, make_model: Any):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        trainer = build(callback, model_init=make_model)
        with pytest.raises(IntegrationError) as caught:
            trainer.train()
        assert str(caught.value) == (
            "the Trainer replaced the LlamaForCausalLM it was built with, as it does with model_init=...; "
            "memwall follows one model: build it first and pass model=..."
        )
        assert callback.session.state == "closed"

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


def test_a_report_without_a_trainer_is_refused():
    from memwall.integrations.trainer import MemwallCallback

    with pytest.raises(IntegrationError, match=r"belongs to no Trainer; pass it as Trainer\(callbacks=\[...\]\)"):
        MemwallCallback(budget="1TiB").report()


def test_an_optimizer_that_is_none_of_torchs_is_refused():
    from memwall.integrations.accelerate import torch_optimizer

    with pytest.raises(IntegrationError, match=r"the optimizer is a object, expected a torch\.optim\.Optimizer"):
        torch_optimizer(object())
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert torch_optimizer(type("Wrapper", (), {"optimizer": inner})()) is inner


@pytest.mark.slow
def test_a_trainer_script_fits_under_the_launcher(run_both_ways: Callable[..., Any]):
    report = run_both_ways(Path(__file__).parent / "scripts" / "train_trainer.py", below_plain=60 * MIB)
    assert report["measured"]["steps"] == NUM_STEPS
    assert report["forecast"]["actions"] != []
