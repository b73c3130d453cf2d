"""The executor wraps the forward of the blocks that a plan names, all or none, and gives each one back."""

from typing import Any

import pytest
from block_models import executor_of
from torch import nn

from memwall.errors import ApplyError
from memwall.planning.techniques.recompute import Recompute


def test_undo_restores_a_class_forward_and_one_of_the_modules_own() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    own = model[1].forward.__func__.__get__(model[1])
    model[1].forward = own
    before = [dict(module.__dict__) for module in model.modules()]
    executor = executor_of(model, Recompute(block="0"), Recompute(block="1", kept_ops=(1,)))
    executor.apply()
    assert "forward" in model[0].__dict__
    assert model[1].forward is not own
    executor.undo()
    assert "forward" not in model[0].__dict__
    assert model[1].forward is own
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_block_that_the_model_does_not_have_is_named_and_nothing_is_wrapped() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    executor = executor_of(model, Recompute(block="0"), Recompute(block="7"))
    with pytest.raises(ApplyError) as error:
        executor.apply()
    assert str(error.value) == (
        "the plan treats the module '7', which this model does not have; make a plan for this model with "
        "`memwall plan` or run with --budget"
    )
    assert "forward" not in model[0].__dict__


def test_a_block_that_cannot_be_wrapped_is_named_and_the_others_are_unwrapped() -> None:
    class Sealed(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise AttributeError("forward is sealed")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(6, 6), Sealed(6, 6))
    executor = executor_of(model, Recompute(block="0"), Recompute(block="1"))
    with pytest.raises(ApplyError) as error:
        executor.apply()
    assert str(error.value) == "the forward of '1' (Sealed) cannot be wrapped: forward is sealed"
    assert "forward" not in model[0].__dict__


def test_every_named_block_is_wrapped_even_if_the_order_lacks_it() -> None:
    """The order comes from the whole batch's trace; a plan for micro-batches may have found other blocks."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    executor = executor_of(model, Recompute(block="0"), Recompute(block="1"), order=("0",))
    executor.apply()
    assert all("forward" in block.__dict__ for block in model)
    executor.undo()
