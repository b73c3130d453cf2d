"""The executor wraps the forward of the blocks that a plan names, all or none, and gives each one back."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from block_models import executor_of, offload
from torch import Tensor, nn

from memwall.errors import ApplyError
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.call_rules import BlockCalls, paths_in_order
from memwall.trace.records import ModuleCall


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


class Noting:
    """An engine that moves nothing, and notes in `events` what is to be read back."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def group(self, *_: Any) -> Any:
        return nullcontext()

    def hooks(self) -> Any:
        return nullcontext()

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        found: Tensor = packed
        return found

    def reread(self, packed: Any) -> Tensor:
        return self.unpack(packed)

    def prefetch(self, key: Any) -> None:
        self._events.append(f"read {key[0]}")


def test_the_order_has_each_call_that_is_differentiated() -> None:
    def calls(*starts: int, backward: int = 90) -> tuple[ModuleCall, ...]:
        return tuple(ModuleCall(0, start, start + 1, backward, backward + 1, (), ()) for start in starts)

    drop = BlockCalls(path="drop", module=0, calls=calls(0, 4) + calls(8, backward=-1), saved=((), (), ()))
    first = BlockCalls(path="first", module=1, calls=calls(2), saved=((),))
    assert paths_in_order([drop, first]) == ("drop", "first", "drop")


def test_a_block_is_read_back_by_the_call_that_follows_it_where_one_block_is_called_again_and_again() -> None:
    """The forecast has it so: read a block earlier, it would lie in memory beside what that block runs again."""
    model = nn.ModuleDict({"drop": nn.Dropout(0.0), "first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    events: list[str] = []
    order = ("drop", "first", "drop", "second", "drop")
    executor = executor_of(model, offload("first"), order=order, engine=Noting(events))
    executor.apply()
    x = torch.ones(2, 4, requires_grad=True)
    x = model["drop"](x)
    x = model["second"](model["drop"](model["first"](x)))
    x.register_hook(lambda _: events.append("second begins"))
    model["drop"](x).sum().backward()
    executor.undo()
    assert events == ["second begins", "read first"]


def test_under_a_plan_that_was_given_a_block_is_read_back_by_its_neighbour_which_has_no_action() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    events: list[str] = []
    executor = executor_of(model, offload("0"), offload("2"), engine=Noting(events))
    executor.apply()
    x = model(torch.ones(2, 4, requires_grad=True))
    x.register_hook(lambda _: events.append("the last one begins"))
    x.sum().backward()
    executor.undo()
    assert events == ["the last one begins", "read 0"]
