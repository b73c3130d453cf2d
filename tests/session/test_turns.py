"""A step ends in which several models have their turns, as those of a GAN, actor and critic, or stages of layers."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memwall
from memwall.session.loop.turns import FirstTurns
from memwall.session.step_borders import StepBorders
from memwall.trace.together import TrainedTogether


class Heard:
    """Notes where steps begin, and how many were counted."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.num_steps = 0

    def step_begins(self) -> None:
        assert borders_of(self).called is not None
        self.begun.append(borders_of(self).called.name)

    def optimizer_stepped(self, *, is_first: bool) -> None:
        self.num_steps += is_first

    def before_forward(self) -> None: ...
    def step_skipped(self) -> None: ...
    def evaluation_begins(self) -> None: ...
    def saving_begins(self) -> None: ...
    def array_begins(self, tensor: torch.Tensor) -> None: ...
    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None: ...


def borders_of(heard: Heard) -> StepBorders:
    return heard.borders  # type: ignore[attr-defined]


class Loop:
    """Holds two models with an optimizer each, and what their loop does next."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.models = {name: nn.Linear(2, 2) for name in "ab"}
        for name, model in self.models.items():
            model.name = name
        self.optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in self.models.items()}
        self.borders = self.heard.borders = StepBorders(self.heard)  # type: ignore[attr-defined]
        self.borders.attach(TrainedTogether(list(self.models.values())), self.optimizers.values())

    def run(self, turns: str) -> str:
        """`a` calls a model and its backward, `A` steps its optimizer; returns the models that began a step."""
        for turn in turns:
            if turn.isupper():
                self.optimizers[turn.lower()].step()
            else:
                self.models[turn](torch.ones(1, 2)).sum().backward()
        return "".join(self.heard.begun)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.borders.detach()


def test_a_gan_s_step_is_over_when_both_have_been_stepped(loop: Loop) -> None:
    # a critic sees real data, a generator's, is stepped; sees them again, and the generator is stepped
    assert loop.run("abaAaB" * 3) == "aaa"
    assert loop.heard.num_steps == 3


def test_actor_and_critic_that_are_called_and_stepped_in_turn_make_one_step(loop: Loop) -> None:
    assert loop.run("aAbB" * 3) == "aaa"
    assert loop.heard.num_steps == 3


def test_layers_that_are_trained_one_after_the_other_have_steps_of_their_own(loop: Loop) -> None:
    assert loop.run("aA" * 3 + "bB") == "aaa"  # the first of b's goes on with the last of a's
    loop.borders.await_all()
    assert loop.run("bB" * 2) == "aaabb"


def test_one_that_is_stepped_once_for_several_of_the_other_is_waited_for_once_it_was_seen(loop: Loop) -> None:
    assert loop.run("aAaAaAbaB") == "aaa"
    loop.borders.await_all()
    assert loop.run("aAaAaAbaB" * 2) == "aaaaa"


def test_one_that_is_called_and_never_stepped_is_not_waited_for_for_ever(loop: Loop) -> None:
    assert loop.run("abA" * 12).startswith("aaa")


@pytest.mark.parametrize(
    ("stepped", "whole"),
    [
        ("ab", [True]),  # the first step had both
        ("a,a,ab,ab", [False, False, False, True]),  # the one that b joins began with a's turn
        ("a,a,a,a,a,a", [False, False, False, False, True, False]),  # b may never come
    ],
)
def test_a_plan_is_made_from_a_step_in_which_every_model_has_its_turn(stepped: str, whole: list[bool]) -> None:
    loop, turns = Loop(), FirstTurns()
    loop.borders.detach()
    models = list(loop.models.values())
    steps = [[loop.optimizers[name] for name in names] for names in stepped.split(",")]
    assert [turns.are_whole(models, step) for step in steps] == whole


def test_micro_batches_of_both_belong_to_one_step(loop: Loop) -> None:
    assert loop.run("ababAB" * 2) == "aa"


def test_what_is_trained_together_is_let_go_with_its_loop() -> None:
    loop = Loop()
    loop.run("aAbB")
    loop.borders.detach()
    models = [id(model) for model in loop.models.values()]
    del loop
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is nn.Linear and id(each) in models]


def test_a_session_that_has_ended_keeps_no_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with memwall.fit(model, optimizer, budget=8 << 30) as session:
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    held = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert held() is None
    assert session.measured.num_steps == 2
