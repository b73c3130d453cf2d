"""A step's questions about a model's parameters are answered right after any change of its layers, without a walk."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memwall.session.loop.changes import Layers


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda _: None,
    "a layer is frozen": lambda whole: whole[0].requires_grad_(False),
    "a layer is put in another's place": lambda whole: whole[1].__setitem__(0, frozen(nn.Linear(2, 2, bias=False))),
    "a parameter is put in another's place": lambda whole: setattr(
        whole[0], "bias", nn.Parameter(torch.ones(2), requires_grad=False)
    ),
    "a layer is added": lambda whole: whole[1].append(nn.Linear(2, 2)),
    "a layer is added to one that had none": lambda whole: whole[0].add_module("adapter", nn.Linear(2, 2)),
    "a layer is taken away": lambda whole: whole.__delitem__(0),
    "a parameter is taken away": lambda whole: setattr(whole[0], "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_which_parameters_are_trained_is_what_a_walk_finds(change: Callable[[nn.Sequential], object]) -> None:
    whole = model()
    layers = Layers(whole)
    assert layers.trained() == (True, True, True)
    change(whole)
    assert layers.trained() == tuple(parameter.requires_grad for parameter in whole.parameters())


def test_the_device_is_that_of_the_first_parameter_and_without_one_the_cpu() -> None:
    assert Layers(nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="meta"))).device == torch.device("meta")
    assert Layers(nn.ReLU()).device == torch.device("cpu")
