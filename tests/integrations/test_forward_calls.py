"""A model whose `forward` a script calls itself is called as any other: hooks hear of it, and it is the same later."""

import copy
import functools
import io
import pickle
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memwall.integrations.scripts.forward_calls import ForwardCalls
from memwall.patches import Patches
from memwall.trace.attached import attach_hook, wrap_forward
from memwall.trace.modules import calls_layers_in_turn


class Layer(nn.Linear):
    """Has an optimizer of its own, as each layer of a forward-forward network."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


OWN = Layer.__dict__.get("forward")


@pytest.fixture
def patches() -> Iterator[Patches]:
    with Patches("tests") as patches:
        yield patches


@pytest.fixture
def calls(patches: Patches) -> ForwardCalls:
    calls = ForwardCalls()
    calls.listen(patches)
    patches.hook(register_module_forward_pre_hook, lambda module, _: calls.called(module))
    return calls


def heard_of(model: nn.Module, patches: Patches) -> list[str]:
    heard: list[str] = []
    patches.push(attach_hook(model.register_forward_pre_hook, lambda *_: heard.append("call")))
    return heard


@pytest.mark.usefixtures("calls")
def test_hooks_hear_of_each_call_of_a_forward_once(patches: Patches) -> None:
    layers = [Layer(), Layer()]
    heard = [heard_of(layer, patches) for layer in layers]
    for layer in layers:
        for _ in range(2):
            layer.forward(torch.ones(2, 3)).sum().backward()
            layer(torch.ones(2, 3))
    assert heard == [["call"] * 4] * 2


@pytest.mark.usefixtures("calls")
def test_a_model_that_is_called_is_left_as_it_was() -> None:
    script = torch.jit.script
    layer = Layer()
    assert "forward" in vars(Layer)
    assert torch.jit.script is not script
    layer(torch.ones(2, 3))
    assert torch.jit.script is script
    assert Layer.__dict__.get("forward") is OWN
    assert "forward" not in vars(layer)


@pytest.mark.usefixtures("calls")
def test_everything_is_as_before_at_the_end(patches: Patches) -> None:
    waiting, called = Layer(), Layer()
    called.forward(torch.ones(2, 3))
    patches.undo()
    assert Layer.__dict__.get("forward") is OWN
    for layer in (waiting, called):
        assert not {"forward", "__getstate__"} & set(vars(layer))
        assert not layer._forward_pre_hooks


@pytest.mark.usefixtures("calls")
def test_a_forward_that_is_wrapped_later_runs_within_the_call(patches: Patches) -> None:
    layer = Layer()
    heard = heard_of(layer, patches)
    layer.forward(torch.ones(2, 3))

    def run(original: object, data: Tensor) -> Tensor:
        heard.append("wrapped")
        return original(data)  # type: ignore[operator, no-any-return]

    unwrap = wrap_forward(layer, run, "layer")
    layer.forward(torch.ones(2, 3))
    layer(torch.ones(2, 3))
    unwrap()
    layer.forward(torch.ones(2, 3))
    assert heard == ["call", "call", "wrapped", "call", "wrapped", "call"]


@pytest.mark.usefixtures("calls")
def test_copies_know_nothing_of_it(patches: Patches) -> None:
    layer = Layer()
    layer.forward(torch.ones(2, 3))
    unwrap = wrap_forward(layer, lambda original, data: original(data), "layer")
    stored = io.BytesIO()
    pickle.dump(layer, stored)
    for each in (copy.deepcopy(layer), pickle.loads(stored.getvalue())):
        assert "forward" not in vars(each)
        assert not each._forward_pre_hooks
    unwrap()


@pytest.mark.usefixtures("calls")
def test_hooks_of_the_script_that_a_call_of_forward_passes_by_stay_passed_by() -> None:
    layer, heard = Layer(), []
    layer.register_forward_hook(lambda *_: heard.append("call"))
    layer.forward(torch.ones(2, 3))
    layer.forward(torch.ones(2, 3))
    assert heard == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("calls")
def test_what_is_to_be_compiled_is_left_as_it_was() -> None:
    layer = Layer()
    assert "forward" in vars(Layer)
    torch.jit.trace(layer, torch.ones(2, 3))
    assert Layer.__dict__.get("forward") is OWN


@pytest.mark.usefixtures("calls")
def test_a_sequence_is_one_whose_class_was_waited_for_when_its_forward_was_wrapped(patches: Patches) -> None:
    """GIVEN two sequences whose forwards are waited for WHEN one is wrapped, both called, THEN both have torch's."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    unwrap = wrap_forward(models[0], lambda original, *args: original(*args), "the first")
    patches.add("forward", "of a test", unwrap)
    found = [[calls_layers_in_turn(model) for model in models]]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        found.append([calls_layers_in_turn(one) for one in models])
    assert found == [[True, True]] * 3


@pytest.mark.usefixtures("calls")
def test_a_forward_that_a_script_has_put_around_a_sequences_is_not_torchs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = functools.wraps(nn.Sequential.forward)(lambda self, x: nn.Sequential.forward(self, 2 * x))
    model.forward = types.MethodType(theirs, model)  # type: ignore[method-assign]
    assert not calls_layers_in_turn(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not calls_layers_in_turn(model)
