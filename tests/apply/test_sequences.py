"""Runs of a sequence's layers are treated as blocks: the sequence calls them, and is as it was afterwards."""

import copy
from collections.abc import Callable

import pytest
import torch
from block_models import executor_of, offload
from plain_cnn import Network, features
from plans import plan_of
from torch import Tensor, nn

from memwall.apply.blocks.executor import BlockExecutor
from memwall.errors import ApplyError
from memwall.planning.action import Action
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

RUNS = "features.0:5", "features.6:12"


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(features(is_in_place=True))


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def applied(model: nn.Module, *paths: str) -> BlockExecutor:
    executor = executor_of(model, *(Recompute(block=path) for path in paths))
    executor.apply()
    return executor


def test_runs_that_are_computed_again_give_the_same_gradients() -> None:
    plain, model = network(), network()
    executor = applied(model, *RUNS)
    expected = gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert [executor.wrapped(path)[1].num_reruns for path in RUNS] == [1, 1]
    for norm, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(norm, other)  # running statistics are updated once


def test_hooks_on_layers_and_on_the_sequence_are_called_as_they_were() -> None:
    model, heard = network(), []
    model.features.register_forward_hook(lambda *_: heard.append("sequence"))
    model.features[6].register_forward_hook(lambda *_: heard.append("layer"))
    applied(model, *RUNS)
    with torch.no_grad():
        model(torch.ones(2, 3, 32, 32))
    assert heard == ["layer", "sequence"]


def test_undoing_gives_the_sequence_its_forward_back() -> None:
    model = network()
    applied(model, *RUNS).undo()
    assert "forward" not in vars(model.features)
    assert list(dict(model.features.named_children())) == [str(number) for number in range(len(model.features))]


def test_copies_of_the_model_have_no_runs() -> None:
    model = network()
    executor = applied(model, *RUNS)
    copied = copy.deepcopy(model)
    assert "forward" not in vars(copied.features)
    executor.undo()


def test_a_layer_that_is_replaced_meanwhile_is_the_one_that_is_called(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN runs in effect WHEN a script puts another layer in THEN that one computes, and a line says so once."""
    plain, model = network(), network()
    applied(model, *RUNS)
    for each in (plain, model):
        torch.manual_seed(7)
        each.features[3] = nn.Conv2d(8, 8, 3, padding=1)
    expected = gradients(plain)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert caplog.text.count("'features' keeps what it saves: a layer of it was replaced") == 1


@pytest.mark.parametrize(
    ("make_model", "path"),
    [
        (network, "features.0:99"),
        (network, "features.5:0"),
        (network, "head.0:1"),
        (lambda: Network(type("Derived", (nn.Sequential,), {"forward": lambda _, x: x})(*features())), "features.0:5"),
    ],
    ids=["no such layer", "the other way round", "no sequence", "a forward of its own"],
)
def test_what_is_no_run_is_refused(make_model: Callable[[], nn.Module], path: str) -> None:
    with pytest.raises(ApplyError, match=f"treats the module '{path}', which this model does not have"):
        applied(make_model(), path)


@pytest.mark.parametrize(
    ("make_model", "runs"),
    [
        (network, RUNS),
        (lambda: nn.Sequential(*network().features, nn.Flatten(), nn.LazyLinear(2)), ("0:5", "6:12")),
    ],
    ids=["in a model", "as the model"],
)
@pytest.mark.parametrize("make_action", [offload, lambda path: Recompute(block=path)], ids=["offload", "recompute"])
def test_training_is_the_same_bit_for_bit(
    make_model: Callable[[], nn.Module], runs: tuple[str, ...], make_action: Callable[[str], Action]
) -> None:
    """GIVEN runs that are moved or computed again WHEN some steps are trained THEN weights are those without a plan."""

    def weights(*actions: Action) -> list[Tensor]:
        torch.manual_seed(0)
        model = make_model()
        model(torch.ones(2, 3, 32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with Session(plan=plan_of(model, *actions)) as session:
            session.attach(model, optimizer)
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randn(2, 3, 32, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not session.measured.lost
        return [*model.parameters(), *model.buffers()]

    expected = weights()
    assert all(torch.equal(a, b) for a, b in zip(weights(*map(make_action, runs)), expected, strict=True))
