"""The Trainer callback plans under a budget, applies a plan, and trains to the same bits."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import MIB, NUM_STEPS, Recorded

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.errors import IntegrationError
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.recompute import Recompute

pytestmark = [pytest.mark.requires("transformers", "accelerate"), pytest.mark.slow]


class TestTraining:
    def test_recording_the_first_step_does_not_change_what_is_learned(self, train: Any, digest: Any, recorded: Any):
        assert recorded.digest == digest(train().model)
        assert recorded.session.plan.actions == ()
        assert recorded.session.measured.num_steps == NUM_STEPS

    def test_a_given_plan_recomputes_and_learns_the_same_bits(
        self,
        train: Any,
        digest: Any,
        make_model: Any,
        recorded: Recorded,
        plan: Plan,
        count_calls: Any,
        caplog: Any,
        monkeypatch: pytest.MonkeyPatch,
    ):
        from memwall.integrations.trainer import MemwallCallback

        # The tests' process holds more than the one that the plan was made for.
        monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: None)
        path = next(action.block for action in plan.actions if isinstance(action, Recompute))
        model, callback = make_model(), MemwallCallback(plan=plan)
        calls = count_calls(model.get_submodule(path).mlp)
        with caplog.at_level(logging.INFO, logger="memwall"):
            train(callback, model=model)
        assert digest(model) == recorded.digest
        assert len(calls) == 1 + 2 * NUM_STEPS, "the first call is proven by a second run"
        assert callback.session.state == "closed"
        assert "forward" not in model.get_submodule(path).__dict__
        report = callback.report()
        assert (report.plan_hash, report.measured.steps) == (plan.plan_hash, NUM_STEPS)
        line = rf"3 steps \(median [\d.]+ s\) under {len(plan.actions)} actions; peak .*, foreseen .*, budget .*"
        assert re.fullmatch(line, caplog.messages[-1])

    def test_a_budget_is_planned_for_after_the_first_step(
        self, train: Any, digest: Any, make_model: Any, recorded: Recorded, count_calls: Any, budget_relative_to: Any
    ):
        from memwall.integrations.trainer import MemwallCallback

        budget_relative_to("plain", 40 * MIB)
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
        plan = make_plan(session.trace, Settings(budget_bytes=plain_bytes - 20 * MIB))
        assert plan.actions != ()
        assert digest(train(MemwallCallback(plan=plan), **settings).model) == expected

    def test_the_trainer_logs_what_steps_need_beside_its_own_figures(self, train: Any, plan: Plan):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(plan=plan)
        trainer = train(callback, logging_strategy="steps", logging_steps=1)
        *steps, summary = trainer.state.log_history
        logged = [{name: value for name, value in one.items() if name.startswith("memwall/")} for one in steps]
        assert [one["memwall/forecast_bytes"] for one in logged] == [plan.forecast.steady_process_bytes] * NUM_STEPS
        assert max(one["memwall/peak_bytes"] for one in logged) == callback.session.measured.peak_bytes
        assert logged[-1]["memwall/step_seconds"] in callback.session.measured.step_seconds
        assert all("loss" in one for one in steps)
        assert not any(name.startswith("memwall/") for name in summary)
        assert "epoch" in trainer.evaluate(), "the Trainer adds to what it logs, which is the result"

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


@pytest.mark.slow(seconds=12)
def test_a_trainer_script_fits_under_the_launcher(run_both_ways: Callable[..., Any]):
    report = run_both_ways(Path(__file__).parents[1] / "scripts" / "train_trainer.py", below_plain=60 * MIB)
    assert report["measured"]["steps"] == 3
    assert report["forecast"]["actions"] != []
