"""A loop may copy or pickle what it trains while memwall is at work on it, as one does that keeps its best weights."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import PLACED, WIDTH, Block, offload
from combinations import every_value
from plans import plan_of
from torch import nn

import memwall
from memwall.planning.action import Action
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute

STREAMED = ParameterPlacement(
    tier="disk", blocks=("0", "1", "2"), window_bytes=1 << 16, min_bytes=1024, written_bytes=0, saved_bytes=1
)
MADE: dict[str, Callable[[Any], Any]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "torch.save": lambda it: loaded(saved(it)),
}
ACTIONS: dict[str, tuple[Action, ...]] = {
    "nothing": (),
    "recompute": (Recompute(block="0"),),
    "offload": (offload("0"), offload("1")),
    "autocast": (Autocast(dtype="bfloat16"),),
    "state on disk": (PLACED,),
    "parameters on disk": (STREAMED, PLACED),
}


def saved(it: Any) -> bytes:
    file = io.BytesIO()
    torch.save(it, file)
    return file.getvalue()


def loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def names_in(it: Any) -> set[str]:
    """What a `weights_only` load of it would have to be allowed."""
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved(it))))


def attributes_of(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(module)) for path, module in model.named_modules()}


def of_somebody_else(*_: Any) -> None:
    """A hook."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("actions", "made"), every_value(ACTIONS, MADE))
def test_a_copied_model_runs_its_own_weights_and_nothing_of_a_plans(
    actions: tuple[Action, ...], made: Callable[[Any], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH)
    with memwall.fit(model, optimizer, plan=plan_of(model, *actions), disk=str(tmp_path)) as session:
        train_step(model, optimizer)
        train_step(model, optimizer)
        copied = made(model)
        train_step(model, optimizer)
        # Steps of the copy are none of the session's.
        own = torch.optim.SGD(copied.parameters(), lr=0.0)
        copied(batch).sum().backward()
        own.step()
        assert session.measured.num_steps == 3
    plain = nn.Sequential(Block(), Block(), Block())
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(copied(batch), plain(batch))
    assert not torch.equal(copied(batch), model(batch))


@pytest.mark.slow
def test_in_the_recorded_step_too(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)):
        copies = [made(model) for made in MADE.values()]
        out = model(torch.ones(8, WIDTH))
        copies += [made(model) for made in MADE.values()]
        out.sum().backward()
        optimizer.step()
    for copied in copies:
        copied.load_state_dict(model.state_dict())
        assert torch.equal(copied(torch.ones(8, WIDTH)), model(torch.ones(8, WIDTH)))


@pytest.mark.parametrize("actions", ACTIONS.values(), ids=list(ACTIONS))
def test_a_copy_and_a_file_are_what_they_would_be_without_memwall(actions: tuple[Action, ...], tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    model.register_forward_pre_hook(of_somebody_else, with_kwargs=True)
    optimizer = torch.optim.AdamW(model.parameters())
    attributes, names = attributes_of(model), names_in(model)
    with memwall.fit(model, optimizer, plan=plan_of(model, *actions), disk=str(tmp_path)):
        for _ in range(2):
            for kept in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
                assert attributes_of(kept) == attributes
                assert list(kept._forward_pre_hooks.values()) == [of_somebody_else]
                assert list(kept._forward_pre_hooks_with_kwargs) == list(kept._forward_pre_hooks)
            assert names_in(model) == names
            assert not any("memwall" in name for name in names_in(optimizer))
            train_step(model, optimizer)
    assert attributes_of(model) == attributes


@pytest.mark.parametrize("made", MADE.values(), ids=list(MADE))
def test_a_copied_optimizer_has_the_state_that_is_on_disk(made: Callable[[Any], Any], tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, plan=plan_of(model, PLACED), disk=str(tmp_path)):
        train_step(model, optimizer)
        train_step(model, optimizer)
        copied, expected = made(optimizer), optimizer.state_dict()["state"]
        train_step(model, optimizer)
    found = copied.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(found[number][name], value) for name, value in state.items())
    for parameter in copied.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert "__getstate__" not in vars(optimizer)
