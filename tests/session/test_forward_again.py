"""Plain loops: a forward that ran out of memory is called again within the same call, to the same bits."""

import hashlib
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from combinations import every_value
from failing_models import Block, Bomb
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import memwall
from memwall import patches
from memwall.errors import OutOfMemoryError
from memwall.session.model_state import ModelState
from memwall.session.session import Session

pytestmark = pytest.mark.slow

SAMPLES, NUM_STEPS = 512, 4


class Model(nn.Module):
    """Blocks with dropout and batch statistics; `before` is called with the model before them, as part of a forward."""

    def __init__(self, before: Callable[["Model", Tensor], Tensor] = lambda _, values: values) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.bomb, self._before = nn.Linear(64, 1), Bomb(), before
        self.count, self.seen, self.mean = 0, [], 0.0
        self.log: dict[str, dict[str, list[int]]] = {"of": {"blocks": []}}
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("table", torch.randn(1 << 17))
        self.register_buffer("large", torch.zeros(1 << 19))

    def forward(self, values: Tensor) -> Tensor:
        values = self._before(self, values)
        for block in self.blocks:
            values = block(values)
        self.bomb.passes()
        return self.head(values)


def everything(model: Model, values: Tensor) -> Tensor:
    """Draws from four generators, counts, collects, keeps a mean, and writes into a buffer."""
    model.count += 1
    model.seen.append(model.count)
    model.log["of"]["blocks"].append(model.count)
    model.log["of"].setdefault(f"step {model.count}", []).append(0)
    model.mean = 0.9 * model.mean + 0.1 * float(values.detach().mean())
    model.total.add_(1.0)
    noise = torch.randn(64, generator=model.generator)
    return values * (1.0 + random.random() + float(np.random.rand())) + noise * model.mean * model.count


def made(before: Callable[[Model, Tensor], Tensor] = lambda _, values: values) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model(before)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: Model, optimizer: torch.optim.Optimizer, fails: tuple[int, ...] = (), session: Session | None = None
) -> str:
    """Trains in a plain loop, or by a session's `compute_gradients`; returns the digest of all that came of it."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    for step in range(NUM_STEPS):
        model.bomb.num_left = fails.count(step)
        batch = torch.randn(SAMPLES, 64)
        if session is None:
            model(batch).square().mean().backward()
        else:
            session.compute_gradients(batch, lambda rows: model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in (*model.parameters(), *model.buffers(), model.generator.get_state()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(repr((random.random(), np.random.rand(), model.count, model.seen, model.log, model.mean)).encode())
    return found.hexdigest()


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


def past_autograd(model: Model, values: Tensor) -> Tensor:
    """Changes a parameter as momentum encoders do."""
    model.head.bias.data.add_(0.5)
    return values


def large_buffer(model: Model, values: Tensor) -> Tensor:
    model.large.add_(1.0)
    return values


def input_in_place(_: Model, values: Tensor) -> Tensor:
    return values.mul_(2.0)


def backward_of_its_own(model: Model, values: Tensor) -> Tensor:
    model.head(values).mean().backward()
    return values


REASONS: dict[Callable[[Model, Tensor], Tensor], str] = {
    past_autograd: "its forward changes head.bias (4 B), of which there is no copy",
    large_buffer: "its forward changes large (2.0 MiB), of which there is no copy",
    backward_of_its_own: "its forward runs a backward of its own",
    input_in_place: "its forward writes into a tensor that it is called with",
}


@pytest.mark.parametrize(("before", "step"), every_value(list(REASONS), [1, 2]))
def test_what_cannot_be_put_back_is_said(before: Callable[[Model, Tensor], Tensor], step: int, tmp_path: Path) -> None:
    """GIVEN a forward with an effect of which there is no copy WHEN it fails THEN the run ends, and says which."""
    model, optimizer = made(before)
    with (
        pytest.raises(OutOfMemoryError) as caught,
        memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
    ):
        train(model, optimizer, (step,))
    assert REASONS[before] in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert session.measured.oom_recoveries == 0


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


def test_what_the_script_recomputes_itself_is_not_called_again(tmp_path: Path) -> None:
    """GIVEN torch's checkpoint around the model, whose hooks count a failed forward too THEN the error says so."""
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        for step in range(3):
            batch = torch.randn(SAMPLES, 64)
            model.bomb.num_left = int(step == 2)
            if step == 2:
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    checkpoint(model, batch, use_reentrant=False)
                assert "the loop computes the gradients itself" in str(session.explained(caught.value))
                break
            checkpoint(model, batch, use_reentrant=False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.oom_recoveries == 0
    assert model.bomb.num_left == 0


def test_containers_too_deep_to_be_remembered_are_the_reason(tmp_path: Path) -> None:
    """GIVEN lists within lists within lists WHEN a forward fails THEN it is not called again with some of them."""
    model, optimizer = made(everything)
    model.seen.append([[[[[[1]]]]]])
    with (
        pytest.raises(OutOfMemoryError, match="it holds containers within containers, too many to be remembered"),
        memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session,
    ):
        train(model, optimizer, (2,))
    assert session.measured.oom_recoveries == 0


def test_a_cache_of_parametrizations_is_no_raw_error(tmp_path: Path) -> None:
    """GIVEN a spectral norm, whose weight torch keeps with its graph WHEN a forward fails THEN that is the reason."""
    model, optimizer = made()
    spectral_norm(model.head)
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        for step in range(2):
            model.bomb.num_left = step
            with parametrize.cached():
                if step:
                    with pytest.raises(torch.OutOfMemoryError) as caught:
                        model(torch.randn(SAMPLES, 64))
                    assert "head.parametrizations.weight computes a parameter" in str(session.explained(caught.value))
                else:
                    model(torch.randn(SAMPLES, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_failure_that_no_plan_makes_up_for_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    model.bomb.asked = "900.00 GiB"
    with (
        pytest.raises(OutOfMemoryError, match="no plan needs less than that; use a smaller batch"),
        memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)),
    ):
        train(model, optimizer, (1,))
    (said,) = [message for message in caplog.messages if "that could be had" in message]
    assert re.fullmatch(r"no plan fits the [\d.]+ MiB that could be had: it takes 90[\d.]+ GiB", said), said


def test_the_first_forward_of_a_step_alone_is_called_again(tmp_path: Path) -> None:
    """GIVEN two forwards in a step WHEN the second fails THEN the run ends: the first one's graph is the loop's."""
    model, optimizer = made()

    def step(num_failures: int) -> None:
        first = model(torch.randn(SAMPLES, 64)).square().mean()
        model.bomb.num_left = num_failures
        (first + model(torch.randn(SAMPLES, 64)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        step(0)
        step(0)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(1)
        assert "the loop computes the gradients itself" in str(session.explained(caught.value))


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


def test_memory_that_runs_out_once_more_while_changes_are_looked_for_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a forward that fails WHEN what it has changed cannot be compared either THEN its own failure is said."""
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        train(model, optimizer)
        failing, original = Bomb(), ModelState._lost
        failing.num_left = model.bomb.num_left = 1
        monkeypatch.setattr(ModelState, "_lost", lambda state: failing.passes() or original(state))  # type: ignore[func-returns-value]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.randn(SAMPLES, 64))
        assert caught.value.__context__ is None
        assert "no memory left to see what its forward has changed" in str(session.explained(caught.value))
    assert failing.num_left == 0


def test_another_error_passes_as_it_is(tmp_path: Path) -> None:
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) as session:
        train(model, optimizer)
        model._before = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(SAMPLES, 64))
    assert session.measured.oom_recoveries == 0


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
