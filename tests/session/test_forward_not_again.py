"""Plain loops: a forward that ran out of memory and cannot be called again ends the run, and the error says why."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from combinations import every_value
from failing_models import SAMPLES, Bomb, Model, everything, made, train
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import memwall
from memwall.errors import OutOfMemoryError
from memwall.session.model_state import ModelState

pytestmark = pytest.mark.slow


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
