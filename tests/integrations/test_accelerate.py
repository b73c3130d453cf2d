"""The Accelerate plugin: a session on what `prepare` returns, the same bits, and what it leaves to the Accelerator."""

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.cli.app import main
from memwall.errors import IntegrationError
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.recompute import Recompute

pytestmark = pytest.mark.requires("transformers", "accelerate")

MIB = 1 << 20
SCRIPT = Path(__file__).parent / "scripts" / "train_accelerate.py"


@pytest.fixture(scope="module")
def train(make_model: Any, samples: Any) -> Callable[..., Any]:
    """Trains the model in a loop of Accelerate's, with an evaluation after each optimizer step; returns the model."""

    def run(plugin: Any = None, *, model: Any = None, batch_size: int = 16, **settings: Any) -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, **settings)
        model = model if model is not None else make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(samples, batch_size=batch_size)
        parts = (model, optimizer, loader)
        model, optimizer, loader = (
            accelerator.prepare(*parts) if plugin is None else plugin.prepare(accelerator, *parts)
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                model.eval()
                with torch.no_grad():
                    model(input_ids=batch["input_ids"][:2])
                model.train()
        return accelerator.unwrap_model(model)

    return run


@pytest.fixture(scope="module")
def recorded(train: Any, digest: Any) -> tuple[str, Any]:
    """Digest and session of a run under a budget that needs nothing."""
    from memwall.integrations.accelerate import MemwallPlugin

    with MemwallPlugin(budget="1TiB") as plugin:
        model = train(plugin)
    return digest(model), plugin.session


@pytest.fixture(scope="module")
def plan(recorded: tuple[str, Any]) -> Plan:
    """A plan that recomputes layers."""
    session = recorded[1]
    budget_bytes = session.plan.forecast.plain_peak.process_bytes - 40 * MIB
    found = make_plan(session.trace, Settings(budget_bytes=budget_bytes))
    assert any(isinstance(action, Recompute) for action in found.actions)
    return found


def with_actions(plan: Plan, actions: Sequence[Action]) -> Plan:
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, actions=tuple(actions)))


class TestTraining:
    @pytest.mark.slow
    def test_recording_the_first_step_does_not_change_what_is_learned(self, train: Any, digest: Any, recorded: Any):
        found, session = recorded
        assert found == digest(train())
        assert (session.state, session.measured.num_steps) == ("closed", 3)

    @pytest.mark.slow
    def test_further_optimizers_are_part_of_the_step(self, make_model: Any, samples: Any):
        from accelerate import Accelerator

        from memwall.integrations.accelerate import MemwallPlugin

        accelerator, model = Accelerator(cpu=True), make_model()
        matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == flag] for flag in (True, False))
        parts = (torch.optim.Muon(matrices), torch.optim.AdamW(rest), DataLoader(samples, batch_size=16))
        with MemwallPlugin(budget="1TiB") as plugin:
            model, muon, adamw, loader = plugin.prepare(accelerator, model, *parts)
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
        assert plugin.session.trace.optimizer == "Muon + AdamW"

    @pytest.mark.slow
    def test_an_evaluation_between_steps_is_no_part_of_the_step(self, recorded: Any):
        step = recorded[1].trace.steps[0]
        assert step.marks[-1] == ("eval", len(step.ops)), "recording ends where the evaluation begins"

    @pytest.mark.slow
    def test_a_given_plan_recomputes_and_learns_the_same_bits(
        self,
        train: Any,
        digest: Any,
        make_model: Any,
        recorded: Any,
        plan: Plan,
        count_calls: Any,
        monkeypatch: pytest.MonkeyPatch,
    ):
        from memwall.integrations.accelerate import MemwallPlugin

        # The tests' process holds more than the one that the plan was made for.
        monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: None)
        path = next(action.block for action in plan.actions if isinstance(action, Recompute))
        model = make_model()
        calls = count_calls(model.get_submodule(path).mlp)
        with MemwallPlugin(plan=plan) as plugin:
            train(plugin, model=model)
        assert digest(model) == recorded[0]
        assert len(calls) == 1 + 3 * 3, "the first call is proven; forward, recomputation and evaluation in three steps"
        assert (plugin.report().plan_hash, plugin.report().measured.steps) == (plan.plan_hash, 3)

    @pytest.mark.slow
    def test_accumulation_and_precision_are_left_to_the_accelerator(self, train: Any, digest: Any, plan: Plan):
        from memwall.integrations.accelerate import MemwallPlugin

        recompute = [action for action in plan.actions if isinstance(action, Recompute)]
        split = (Accumulate(micro_batch=4, num_micro_batches=4), Autocast(dtype="bfloat16"))
        whole = with_actions(plan, (*split, *recompute))
        with MemwallPlugin(plan=whole) as plugin:
            model = train(plugin, batch_size=4, **whole.accelerate_kwargs())
        assert plugin.session.measured.num_steps == 3
        assert digest(model) == digest(train(batch_size=4, gradient_accumulation_steps=4, mixed_precision="bf16"))

    @pytest.mark.slow
    def test_a_failed_loop_gives_the_model_back(self, train: Any, plan: Plan, make_model: Any):
        from memwall.integrations.accelerate import MemwallPlugin

        model = make_model()
        handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), MemwallPlugin(plan=plan) as plugin:
            train(plugin, model=model)
        handle.remove()
        assert plugin.session.state == "closed"
        assert [path for path, module in model.named_modules() if "forward" in module.__dict__] == []


class TestRefusals:
    @pytest.fixture
    def refusal(self, make_model: Any, samples: Any) -> Callable[..., str]:
        """What preparing with a plan says."""

        def of(plan: Plan, *, batch_size: int = 16, **settings: Any) -> str:
            from accelerate import Accelerator

            from memwall.integrations.accelerate import MemwallPlugin

            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(samples, batch_size=batch_size)
            with pytest.raises(IntegrationError) as caught:
                MemwallPlugin(plan=plan).prepare(Accelerator(cpu=True, **settings), model, optimizer, loader)
            return str(caught.value)

        return of

    def test_an_accelerator_that_does_not_accumulate(self, refusal: Any, plan: Plan):
        split = with_actions(plan, [Accumulate(micro_batch=4, num_micro_batches=4)])
        assert refusal(split, gradient_accumulation_steps=2) == (
            "the plan needs Accelerator(gradient_accumulation_steps=4), found gradient_accumulation_steps=2; "
            "Accelerator(**plan.accelerate_kwargs()) sets them"
        )

    def test_an_accelerator_of_another_precision(self, refusal: Any, plan: Plan):
        lower = with_actions(plan, [Autocast(dtype="bfloat16")])
        assert refusal(lower) == (
            "the plan needs Accelerator(mixed_precision='bf16'), found mixed_precision='no'; "
            "Accelerator(**plan.accelerate_kwargs()) sets them"
        )

    def test_a_loader_of_other_micro_batches(self, refusal: Any, plan: Plan):
        split = with_actions(plan, [Accumulate(micro_batch=4, num_micro_batches=4)])
        assert refusal(split, gradient_accumulation_steps=4) == (
            "the plan runs micro-batches of 4 samples, 4 per step; found data loaders with batch_size 16; "
            "set batch_size=4"
        )

    def test_a_second_model(self, make_model: Any):
        from accelerate import Accelerator

        from memwall.integrations.accelerate import MemwallPlugin

        plugin, model = MemwallPlugin(budget="1TiB"), make_model()
        parts = (Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
        plugin.prepare(*parts)
        with pytest.raises(IntegrationError, match=r"already trains a model; close it, or use one plugin for each"):
            plugin.prepare(*parts)
        plugin.close()

    def test_a_report_of_nothing(self):
        from memwall.integrations.accelerate import MemwallPlugin

        with pytest.raises(IntegrationError, match=r"prepare\(accelerator, model, optimizer\) was not called"):
            MemwallPlugin(budget="1TiB").report()


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ((), {"mixed_precision": "no", "gradient_accumulation_steps": 1}),
        (
            (Accumulate(micro_batch=4, num_micro_batches=4), Autocast(dtype="bfloat16")),
            {"mixed_precision": "bf16", "gradient_accumulation_steps": 4},
        ),
    ],
)
def test_a_plans_arguments_build_an_accelerator(plan: Plan, actions: tuple[Action, ...], expected: dict[str, Any]):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **with_actions(plan, actions).accelerate_kwargs())
    assert {name: getattr(accelerator, name) for name in expected} == expected


@pytest.mark.slow
def test_a_script_of_accelerates_fits_under_the_launcher(
    budget_relative_to: Callable[[str, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; in one of its own runs the Trainer's, which has an Accelerator inside."""
    from accelerate.state import AcceleratorState, GradientState

    script, plain, fitted = str(SCRIPT), tmp_path / "plain.pt", tmp_path / "fitted.pt"
    monkeypatch.setattr(sys, "argv", [script, "--out", str(plain)])
    runpy.run_path(script, run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    budget_relative_to("plain", 50 * MIB)
    report = tmp_path / "run.json"
    assert main(["run", "--budget", "1TiB", "--report", str(report), script, "--out", str(fitted)]) == 0
    found = json.loads(report.read_text())
    assert found["measured"]["steps"] == 2
    assert found["forecast"]["actions"] != []
    expected, weights = torch.load(plain), torch.load(fitted)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
