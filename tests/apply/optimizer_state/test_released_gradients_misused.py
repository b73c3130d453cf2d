"""Parameters that are stepped within backward: a loop that does not go on as it began ends with one clear error."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from released_models import MAKERS, Ends, Step, TiedModel, batches, released, trained
from torch import Tensor, nn

from memwall.apply.optimizer_state import released_gradients
from memwall.apply.optimizer_state.released_gradients import ReleasedGradients
from memwall.errors import NotExactError
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.session.step_state import StepState


class Late:
    """A loop that does something else in its third step."""

    def __init__(self, does: Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]) -> None:
        self._does, self._num_steps = does, 0

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        self._num_steps += 1
        model(batch).backward()
        if self._num_steps == 3:
            self._does(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()


def _clip(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _set_rate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _add_up(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).backward()


def _drop(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()


@torch.no_grad()
def _write(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    next(model.parameters()).mul_(0.5)


def _save_model(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model.state_dict()


def _save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.state_dict()


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": []})


def _replace_state(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.state = defaultdict(dict)


def _run_part(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model.embed(batch)


def _end(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    raise Ends


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (_clip, "is looked at or added to after the optimizer has used it"),
        (_set_rate, "'lr' of the AdamW has changed since backward"),
        (_add_up, "a forward runs after a backward whose step the optimizer has not ended"),
        (_drop, "a gradient was dropped or put in place of another between backward and step"),
        (_write, "a parameter .* was written between backward and step"),
        (_save_model, "are saved or loaded between backward and the optimizer's step"),
        (_save_optimizer, "are saved or loaded between backward and the optimizer's step"),
        (_load_optimizer, "are saved or loaded between backward and the optimizer's step"),
        (_replace_state, "the state of the AdamW was replaced since backward"),
        (_run_part, "a Embedding runs with parameters that have been stepped already"),
        (_end, "the training ends after a backward whose step the optimizer has not ended"),
    ],
)
def test_a_loop_that_does_otherwise_later_ends_with_one_clear_error(does: Step, found: str) -> None:
    with pytest.raises(NotExactError, match=found) as raised:
        trained("adamw", released(), step=Late(does))
    assert "Some parameters have been stepped already" in str(raised.value)


def _reads(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _leaves_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad = lambda: None  # type: ignore[method-assign, assignment, misc]


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
@pytest.mark.parametrize(
    ("does", "found"),
    [
        (_reads, "is looked at or added to after the optimizer has used it"),
        (_steps, "the optimizer steps again with a gradient that it has used"),
        (_leaves_gradients, "is looked at or added to after the optimizer has used it"),
    ],
)
def test_gradients_that_are_used_after_the_step_are_an_error(
    does: Callable[[nn.Module, torch.optim.Optimizer], None], found: str, name: str
) -> None:
    """GIVEN a loop that reads, steps or adds to gradients after its third step WHEN it does THEN it is told."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        numbers.append(len(numbers))
        model(batch).backward()
        optimizer.step()
        if len(numbers) == 3:
            does(model, optimizer)
        optimizer.zero_grad()

    numbers: list[int] = []
    with pytest.raises(NotExactError, match=found):
        trained(name, released(), step=step)


@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
def test_a_backward_that_memory_ran_out_in_is_not_done_again(name: str) -> None:
    """GIVEN some parameters stepped WHEN memory runs out later in that backward THEN the run ends."""

    def out_of_memory(_: Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5000000 bytes.")

    torch.manual_seed(0)
    model = TiedModel()
    optimizer = MAKERS[name](model.parameters())
    within = ReleasedGradients(model, optimizer, waiting=(), window_bytes=1)
    state = StepState(model)
    state.take()
    assert state.why_not() is None
    model.blocks[0].up.weight.register_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="can't allocate"):
        model(batches(1)[0]).backward()
    assert "was changed before the optimizer stepped" in (state.why_not() or "")
    with pytest.raises(NotExactError, match="whose step the optimizer has not ended"):
        within.undo()


def test_a_step_within_backward_that_fails_midway_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        numbers.append(len(numbers))
        if len(numbers) == 9:
            raise RuntimeError("no memory")
        real(*arguments)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        with suppress(RuntimeError):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    numbers: list[int] = []
    real = released_gradients.step_some
    monkeypatch.setattr(released_gradients, "step_some", failing)
    with pytest.raises(NotExactError, match="stepping a parameter within backward failed midway"):
        trained("sgd", GradientRelease(window_bytes=1), step=step)


def test_a_second_backward_is_an_error() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        model(batch).backward()
        torch.ones((), requires_grad=True).backward()

    with pytest.raises(NotExactError, match="a second backward runs before the optimizer has ended the step"):
        trained("adamw", released(), step=step)
