"""Whether the losses of a batch's parts add up is read off a Trainer, whatever Python has compiled it."""

import dis
from types import SimpleNamespace
from typing import Any

import pytest

from memwall.integrations.trainer_steps import _own_mean


class Base:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return num_items_in_batch


class Passes(Base):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Names(Base):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(inputs), "num_items_in_batch"


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Base, ""), (Passes, ""), (Names, "Names.compute_loss does not use num_items_in_batch")],
)
def test_a_number_of_labels_that_is_handed_on_is_used(kind: type, said: str) -> None:
    assert _own_mean(kind()) == said


@pytest.mark.parametrize(
    ("opname", "names", "said"),
    [
        ("LOAD_FAST_LOAD_FAST", ("return_outputs", "num_items_in_batch"), ""),
        ("STORE_FAST_LOAD_FAST", ("loss", "num_items_in_batch"), ""),
        ("STORE_FAST_LOAD_FAST", ("num_items_in_batch", "loss"), "Base.compute_loss does not use num_items_in_batch"),
    ],
)
def test_instructions_that_name_two_variables(
    opname: str, names: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN what Python 3.13 compiles a pair of variables to."""
    instruction = SimpleNamespace(opname=opname, argval=names)
    monkeypatch.setattr(dis, "get_instructions", lambda code: [instruction])
    assert _own_mean(Base()) == said


def test_a_label_smoother_that_is_told_no_number_of_labels_takes_a_mean() -> None:
    trainer: Any = Base()
    trainer.label_smoother = lambda outputs, labels, shift_labels=False: 0.0
    assert _own_mean(trainer) == "label smoothing of this transformers takes no num_items_in_batch"
    trainer.label_smoother = lambda outputs, labels, shift_labels=False, num_items_in_batch=None: 0.0
    assert _own_mean(trainer) == ""
