"""The models of a script are found from what is alive: its optimizers hold parameters, its modules hold them too."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.integrations.scripts.trained_models import TrainedModels, as_one, optimizers_alive, trained_with
from memwall.trace.together import TrainedTogether, models_of

Found = Callable[..., TrainedModels]


@pytest.fixture
def found_with() -> Found:
    """Finds models beside those that other tests keep for the whole session, with their optimizers."""
    return partial(trained_with, foreign=set(optimizers_alive()))


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for model in models for parameter in model.parameters()])


def test_the_models_of_other_optimizers_are_found_with_the_one_that_is_called(found_with: Found) -> None:
    critic, generator = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizers = adam(critic), adam(generator)
    found = found_with(critic)
    assert found.is_trained
    assert {id(model) for model in found.models} == {id(critic), id(generator)}
    del optimizers


def test_of_one_model_there_is_nothing_else(found_with: Found) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = adam(model)
    assert found_with(model).models == (model,)
    assert as_one((model,)) is model
    del optimizer


def test_two_modules_of_one_optimizer_are_trained_together(found_with: Found) -> None:
    encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = adam(encoder, decoder)
    together = as_one(found_with(encoder).models)
    assert isinstance(together, TrainedTogether)
    assert [name for name, _ in together.named_children()] == ["Linear", "Linear#2"]
    assert set(models_of(together)) == {encoder, decoder}
    del optimizer


def test_alike_modules_come_in_the_order_of_their_optimizer(found_with: Found) -> None:
    """GIVEN a module that the garbage collector has looked at, and so lists last WHEN found THEN its place is kept."""
    encoder, first = nn.Linear(3, 3), nn.Linear(3, 3)
    gc.collect(0)
    second = nn.Linear(3, 3)
    optimizer = adam(first, second, encoder)
    assert found_with(encoder).models == (encoder, first, second)
    del optimizer


def test_models_are_found_where_a_script_has_frozen_what_the_collector_knows(freezes: None, found_with: Found) -> None:
    encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = adam(encoder, decoder)
    gc.freeze()
    assert found_with(encoder).models == (encoder, decoder)
    del optimizer


@pytest.mark.usefixtures("freezes")
def test_garbage_that_came_after_a_script_has_frozen_is_collected() -> None:
    gc.collect()
    gc.freeze()
    model = nn.Linear(3, 3)
    model.held = [model]
    held = weakref.ref(model)
    del model
    optimizers_alive()
    gc.collect()
    assert held() is None


def test_a_teacher_that_no_optimizer_holds_is_not_trained(found_with: Found) -> None:
    teacher, student = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = adam(student)
    assert not found_with(teacher).is_trained
    del optimizer


@pytest.mark.parametrize("in_one", [False, True], ids=["each by itself", "all in one"])
def test_a_model_whose_copies_are_trained_is_stepped_by_hand(in_one: bool, found_with: Found) -> None:
    model = nn.Linear(3, 3).bfloat16()
    copies = [parameter.detach().float() for parameter in model.parameters()]
    copies = [torch.cat([copy.flatten() for copy in copies])] if in_one else copies
    optimizer = torch.optim.SGD([copy.requires_grad_() for copy in copies], lr=0.1)
    found = found_with(model)
    assert (found.is_trained, found.has_optimizer, found.models) == (True, False, (model,))
    assert optimizer.param_groups


@pytest.mark.parametrize(("dtype", "is_trained"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_model_in_lower_precision_is_stepped_by_hand(dtype: torch.dtype, is_trained: bool, found_with: Found) -> None:
    """GIVEN an optimizer of a model that is not called WHEN one like it is THEN it may be a teacher, if as precise."""
    trained, called = nn.Linear(3, 3), nn.Linear(3, 3).to(dtype)
    optimizer = adam(trained)
    found = found_with(called)
    assert found.is_trained == is_trained
    assert called in found.models
    assert optimizer.param_groups


@pytest.mark.parametrize("has_gradients", [False, True], ids=["a teacher", "mixed precision by hand"])
def test_one_in_lower_precision_is_let_go_of_where_the_other_is_called_and_it_has_no_gradient(
    has_gradients: bool,
) -> None:
    begun: list[nn.Module] = []
    watch = ScriptWatch("train.py", lambda model, called, has_optimizer: begun.append(model))
    model = nn.Linear(3, 3)
    lower, optimizer = copy.deepcopy(model).bfloat16(), adam(model)
    for number in range(2):
        for called in (lower, model):
            watch.before_forward(called)
            watch.after_forward(called)
            if has_gradients and not number and called is lower:
                lower(torch.ones(1, 3).bfloat16()).sum().backward()
    assert begun[0] is lower
    assert [set(models_of(each)) for each in begun[1:]] == [{lower, model} if has_gradients else {model}]
    assert optimizer.param_groups


def test_an_optimizer_is_known_where_a_model_is_called_with_what_is_made_of_its_parameters(found_with: Found) -> None:
    model, found = nn.Linear(3, 3), []
    optimizer = adam(model)
    model.register_forward_pre_hook(lambda called, _: found.append(found_with(called)))
    lower = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, lower, (torch.ones(1, 3).bfloat16(),))
    assert [each.of_copies for each in found] == [(optimizer,)]


def test_a_network_through_which_an_image_is_trained_is_none_of_the_script_s(found_with: Found) -> None:
    """GIVEN an optimizer of fewer numbers than a network has WHEN that is called THEN it measures a loss."""
    network, image = nn.Linear(8, 8), torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=0.1)
    assert not found_with(network).is_trained
    assert optimizer.param_groups


def test_a_frozen_network_that_a_transform_calls_is_not_trained(found_with: Found) -> None:
    """GIVEN an optimizer of tensors that no module holds WHEN torch.func calls a frozen network THEN it is no model."""
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
    frozen, found = nn.Linear(4, 4).requires_grad_(False), []

    def called(batch: torch.Tensor) -> torch.Tensor:
        found.append(found_with(frozen))
        return frozen(batch)

    torch.func.vmap(called)(torch.ones(2, 4))
    assert [each.is_trained for each in found] == [False]
    assert optimizer.param_groups


def test_a_class_around_the_whole_loop_is_no_model(found_with: Found) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    loop = Loop()
    optimizers = adam(loop.actor), adam(loop.critic)
    assert set(found_with(loop.actor).models) == {loop.actor, loop.critic}
    del optimizers


def test_a_larger_model_takes_the_place_of_its_parts(found_with: Found) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = adam(model)
    assert found_with(model, known=[model[0]]).models == (model,)
    del optimizer


def test_optimizers_that_were_there_before_the_script_are_not_its_own() -> None:
    before, own = nn.Linear(2, 2), nn.Linear(2, 2)
    other, mine = torch.optim.SGD(before.parameters(), lr=0.1), torch.optim.SGD(own.parameters(), lr=0.1)
    assert set(trained_with(own, foreign=set(optimizers_alive()) - {mine}).models) == {own}
    assert before in trained_with(own).models
    assert other is not mine
