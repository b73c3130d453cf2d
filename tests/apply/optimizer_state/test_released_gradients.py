"""Parameters that are stepped within backward: bits of a plain run, its peak without gradients, what rules it out."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import a_plan, plan_of
from released_models import (
    MAKERS,
    WINDOW_BYTES,
    Step,
    TiedModel,
    are_same,
    batches,
    plain_step,
    released,
    trained,
)
from torch import Tensor, nn

import memwall
from memwall.apply.optimizer_state import released_gradients
from memwall.apply.optimizer_state.released_gradients import ReleasedGradients
from memwall.apply.optimizer_state.spent_gradient import SpentGradient
from memwall.errors import ApplyError, NoEffectError, NotExactError
from memwall.planning.action import Action
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.curve import live_peak_bytes
from memwall.predict.gradient_release import with_gradients_released
from memwall.trace.modules import fingerprint
from memwall.trace.trace_builder import TraceBuilder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MAKERS)
def test_bits_are_those_of_a_plain_run(name: str, device: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        seen.append([isinstance(p.grad, SpentGradient) for p in model.parameters()])
        optimizer.step()

    seen: list[list[bool]] = []
    assert are_same(trained(name, device=device), trained(name, released(), step=step, device=device))
    assert all(map(all, seen))


@pytest.mark.parametrize("device", DEVICES)
def test_so_they_are_with_recomputed_blocks_and_tied_embeddings(device: str) -> None:
    recomputed = [
        Recompute(block=f"blocks.{number}", kept_ops=(), saved_bytes=1, cost_seconds=0.0) for number in range(3)
    ]
    assert are_same(trained("adamw", device=device), trained("adamw", released(), *recomputed, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_peak_is_the_one_that_is_foreseen(name: str, device: str) -> None:
    peaks = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = TiedModel(8).to(device)
        optimizer, builder = MAKERS[name](model.parameters()), TraceBuilder([model])
        (batch,) = batches(1, device)
        plain_step(model, optimizer, batch)
        within = ReleasedGradients(model, optimizer, waiting=(), window_bytes=WINDOW_BYTES) if releases else None
        builder.start_step(optimizer)
        plain_step(model, optimizer, batch)
        step = builder.finish_step(optimizer)
        if within is not None:
            assert within.num_released == len(list(model.parameters()))
            within.undo()
        else:
            names = builder.trace(optimizer).names
            foreseen_bytes = live_peak_bytes(
                with_gradients_released(step, names, window_bytes=WINDOW_BYTES), step.storages[0].device_type
            )
        peaks.append(live_peak_bytes(step, step.storages[0].device_type))
    assert peaks[1] < peaks[0]
    assert foreseen_bytes == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_groups_that_change_between_steps_are_followed(name: str) -> None:
    """GIVEN a loop whose groups are turned around, and lose a parameter WHEN it trains THEN bits are the plain ones."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        groups = optimizer.param_groups
        if len(groups) == 1:
            first = groups[0]["params"]
            groups.append({**groups[0], "params": first[:3], "initial_lr": 0.1, "lr": 0.1})
            groups[0]["params"] = first[3:-1]
        groups.reverse()
        plain_step(model, optimizer, batch)
        model.zero_grad()

    assert are_same(_groups_turned(name, step), _groups_turned(name, step, released()))


def _groups_turned(name: str, step: Step, *actions: Action) -> list[Any]:
    torch.manual_seed(0)
    model = TiedModel()
    optimizer = MAKERS[name](model.parameters())
    made = a_plan(*actions, model_fingerprint=fingerprint([model]), process_bytes=1)
    with memwall.fit(model, optimizer, plan=made) if actions else nullcontext():
        for number, batch in enumerate(batches(6)):
            (step if number > 2 else plain_step)(model, optimizer, batch)
    return [value.clone() for value in model.state_dict().values()]


def test_gradients_of_parameters_with_hooks_that_come_later_stay() -> None:
    """GIVEN hooks on accumulated gradients from the third step on WHEN a loop trains THEN bits are the plain ones."""

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        numbers.append(len(numbers))
        if len(numbers) % 6 == 3:
            model.blocks[1].up.weight.register_post_accumulate_grad_hook(halve)
        plain_step(model, optimizer, batch)

    numbers: list[int] = []
    plain = trained("sgd", step=step)
    assert are_same(plain, trained("sgd", GradientRelease(window_bytes=1), step=step))


def test_gradients_of_a_backward_that_keeps_its_graph_stay() -> None:
    """GIVEN a step whose graph is gone through again WHEN that is so after others THEN it is to the same gradients."""
    found: list[list[Tensor]] = [[], []]

    def step_into(norms: list[Tensor]) -> Step:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
            loss = model(batch)
            is_late = len(optimizer.state) > 0
            loss.backward(retain_graph=is_late)
            if is_late:
                norms.extend(map(torch.norm, torch.autograd.grad(loss, [*model.parameters()])))
            optimizer.step()
            optimizer.zero_grad()

        return step

    expected = trained("adamw", step=step_into(found[0]))
    assert are_same(trained("adamw", released(), step=step_into(found[1])), expected)
    assert len(found[0]) == len(found[1]) > 0
    assert all(map(torch.equal, *found))


def test_a_copy_of_the_model_steps_by_itself() -> None:
    """GIVEN a loop that keeps copies of its model by deepcopy WHEN they are called THEN they have no hooks of this."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        plain_step(model, optimizer, batch)
        copied = copy.deepcopy(model)
        copied(batch).backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())

    assert are_same(trained("adamw", step=step), trained("adamw", released(), step=step))


class Masked(nn.Module):
    """Uses a weight in its first layer besides in a way that no gradient comes back from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first = TiedModel(1), nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.inner(tokens) * (self.first * self.scale.detach()) * self.scale
        return out


def test_parameters_that_backward_still_reads_wait_for_the_step() -> None:
    torch.manual_seed(3)
    plain = trained("sgd", model=Masked())
    torch.manual_seed(3)
    assert are_same(plain, trained("sgd", released(waiting=("scale",)), model=Masked()))
    for name in ("sgd", "adamw fused"):
        with pytest.raises(NotExactError, match="backward reads a parameter that has been stepped already"):
            trained(name, GradientRelease(window_bytes=1), model=Masked())


def test_a_step_that_makes_other_bits_proves_itself_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(optimizer: Any, inner: Any, part: Any, arguments: Any) -> None:
        for _, some in part:
            for parameter in some:
                parameter.grad.mul_(2)
        real(optimizer, inner, part, arguments)

    real = released_gradients.step_some
    monkeypatch.setattr(released_gradients, "step_some", doubled)
    with pytest.raises(NotExactError, match="is not what the optimizer's own step makes of it"):
        trained("sgd", released())


def test_undo_leaves_nothing_and_gradients_stay_again() -> None:
    torch.manual_seed(0)
    model = TiedModel()
    optimizer = MAKERS["adamw"](model.parameters())
    within = ReleasedGradients(model, optimizer, waiting=(), window_bytes=1)
    within.undo()
    model(batches(1)[0]).backward()
    assert within.num_released == 0
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_closures_keep_their_gradients() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    with pytest.raises(NoEffectError, match="none of its gradients came by way of a plain backward"):
        trained("sgd", released(), step=step)


def test_where_it_cannot_be_done_a_given_plan_is_refused() -> None:
    model = TiedModel()
    optimizer = MAKERS["sgd"](model.parameters())
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    with (
        pytest.raises(ApplyError, match="a hook that runs when its gradient is accumulated"),
        memwall.fit(model, optimizer, plan=plan_of(model, released())),
    ):
        plain_step(model, optimizer, batches(1)[0])


def test_step_hooks_of_the_script_rule_it_out(tmp_path: Path) -> None:
    model = TiedModel()
    optimizer = MAKERS["sgd"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with (
        pytest.raises(ApplyError, match="step hooks of the script's"),
        memwall.fit(model, optimizer, plan=plan_of(model, released())),
    ):
        plain_step(model, optimizer, batches(1)[0])
