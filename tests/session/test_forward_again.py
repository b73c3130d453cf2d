"""Plain loops: a forward that ran out of memory is called again within the same call, to the same bits."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import every_value
from failing_models import NUM_STEPS, SAMPLES, Bomb, Model, everything, made, train
from torch import Tensor, nn

import memwall
from memwall import patches
from memwall.session.model_state import ModelState
from memwall.session.session import Session

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("fails", "is_handed_over"), every_value([(1,), (2,), (3,), (1, 1), (1, 3)], [False, True]))
def test_a_forward_is_called_again_to_the_same_bits(
    fails: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_handed_over: bool
) -> None:
    """GIVEN a forward that changes whatever it can WHEN it fails THEN nothing is different, and one line is said."""
    expected = train(*made(everything))
    model, optimizer = made(everything)
    with (
        caplog.at_level(logging.WARNING, logger="memwall.session.recovery"),
        memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
    ):
        found = train(model, optimizer, fails, session if is_handed_over else None)
    assert found == expected
    assert session.measured.oom_recoveries == len(fails)
    assert session.measured.num_steps == NUM_STEPS
    assert session.plan is not None
    assert session.plan.actions != ()
    lines = [record.getMessage() for record in caplog.records if record.name == "memwall.session.recovery"]
    assert len(lines) == len(fails)
    again = "step" if is_handed_over else "forward"
    assert lines[0].startswith(f"out of memory in the forward of step {fails[0] + 1}: 4.0 MiB asked for, ")
    assert f"the {again} is done again; attempt 1 of 3, under a plan for " in lines[0]
    assert not [change for change in patches.active() if not change.permanent]


def test_hooks_and_arguments_are_those_of_the_first_call(tmp_path: Path) -> None:
    """GIVEN a forward that takes things out of its batch WHEN it fails THEN they are there again, and what hooks have
    collected is what they collect of one forward."""
    called: list[str] = []

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
            return (self.model(batch.pop("values")) - batch.pop("labels")).square().mean() * scale

    torch.manual_seed(0)
    model = Takes()
    model.register_forward_pre_hook(lambda *_: called.append("model"))
    model.model.blocks[0].register_forward_pre_hook(lambda *_: called.append("block"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        for step in range(3):
            model.model.bomb.num_left = int(step == 1)
            batch = {"values": torch.randn(SAMPLES, 64), "labels": torch.randn(SAMPLES, 1)}
            model(batch, scale=0.5).backward()
            assert batch == {}
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.oom_recoveries == 1
    assert called == ["model", "block"] * 3


class Wide(Model):
    """Keeps running statistics of more bytes than are copied before each forward whatever becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(64, 1 << 15, bias=False), nn.BatchNorm1d(1 << 15), nn.Linear(1 << 15, 64))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values + self.wide(values[:2]).mean(0))


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_large_running_statistics_go_back(tmp_path: Path, *, evaluates_first: bool) -> None:
    """GIVEN a norm of many features, which an evaluation leaves as it was WHEN a later forward fails THEN its running
    mean has one batch in it, not two."""

    def trained(*, is_planned: bool) -> str:
        torch.manual_seed(0)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if not is_planned:
            return train(model, optimizer)
        with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
            if evaluates_first:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(SAMPLES, 64))
                model.train()
            found = train(model, optimizer, (1, 3))
        assert session.measured.oom_recoveries == 2
        return found

    assert trained(is_planned=True) == trained(is_planned=False)


def test_short_steps_are_looked_after_in_the_first_ones_under_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN steps beside which the look is dear WHEN the plan has shown what it needs THEN the error says so."""
    monkeypatch.setattr("memwall.session.forward_redo._CHEAP_SHARE", 0.0)
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        train(model, optimizer)
        train(model, optimizer, (3,))
        assert session.measured.oom_recoveries == 1
        train(model, optimizer)
        train(model, optimizer)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(model, optimizer, (1,))
        assert "steps are so short that" in str(session.explained(caught.value))


@pytest.mark.parametrize("what", ["take", "settle"])
def test_memory_that_runs_out_for_what_is_kept_ends_no_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN no memory for a copy of what a forward changes WHEN it runs THEN it runs, and the next has its copy."""
    expected = train(*made(everything))
    model, optimizer = made(everything)
    failing, original = Bomb(), getattr(ModelState, what)
    failing.num_left = 1

    def fails(state: ModelState) -> None:
        failing.passes()
        original(state)

    monkeypatch.setattr(ModelState, what, fails)
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        found = train(model, optimizer, (2,))
    assert failing.num_left == 0
    assert found == expected
    assert session.measured.oom_recoveries == 1


@pytest.mark.parametrize(("mode", "is_planned"), every_value([torch.no_grad, torch.inference_mode], [True, False]))
def test_an_evaluation_is_called_again_and_no_plan_changes(
    mode: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_planned: bool
) -> None:
    """GIVEN an evaluation that fails, before the first step or later THEN its result and all else are the same."""

    def run(session: Session | None, num_failures: int) -> tuple[Tensor, str]:
        first = train(model, optimizer) if is_planned else ""
        plan = None if session is None else session.plan
        found = []
        for _ in range(2):
            model.bomb.num_left = num_failures
            with mode():
                found.append(model(torch.randn(SAMPLES, 64)).clone())
        assert session is None or session.plan is plan
        return torch.stack(found), first + train(model, optimizer)

    model, optimizer = made(everything)
    result, digest = run(None, 0)
    model, optimizer = made(everything)
    with (
        caplog.at_level(logging.WARNING, logger="memwall.session.recovery"),
        memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
    ):
        again, found = run(session, 1)
    assert torch.equal(result, again)
    assert found == digest
    assert session.measured.oom_recoveries == 0
    lines = [record.getMessage() for record in caplog.records if record.name == "memwall.session.recovery"]
    assert len(lines) == 1
    assert lines[0].startswith(f"out of memory in evaluation, after step {NUM_STEPS * is_planned}: 4.0 MiB asked for")


def test_an_evaluation_that_fails_twice_ends_the_run(tmp_path: Path) -> None:
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        train(model, optimizer)
        model.bomb.num_left = 2
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.randn(SAMPLES, 64))
        assert "the training batch and its plan stay as they are" in str(session.explained(caught.value))


def test_by_accelerate_a_plain_loop_calls_its_forward_again(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from memwall.integrations.accelerate import MemwallPlugin

    def trained(budget: str | None, fails: int) -> tuple[str, Any]:
        model, optimizer = made(everything)
        accelerator = accelerate.Accelerator(cpu=True)
        if budget is None:
            return train(*accelerator.prepare(model, optimizer)), None
        with MemwallPlugin(budget=budget, disk=str(tmp_path)) as plugin:
            return train(*plugin.prepare(accelerator, model, optimizer), (fails,)), plugin.session

    expected, _ = trained(None, 0)
    found, session = trained("1TiB", 2)
    assert found == expected
    assert session.measured.oom_recoveries == 1
