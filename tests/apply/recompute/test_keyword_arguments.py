"""Recomputed blocks that get tensors by keyword: random states, offload and gradients as for those by position."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from block_models import executor_of
from hidden_state import assert_same, under
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute

pytestmark = pytest.mark.usefixtures("one_thread")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, scale: float, *, hidden_states: Tensor, extra: dict[str, list[Tensor]]) -> Tensor:
        y = nn.functional.dropout(torch.sin(self.up(hidden_states)), 0.5)
        extra["seen"].append(y)
        return self.down(y * extra["masks"][0]) * scale


def call(model: nn.Module, hidden: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    extra = {"masks": [mask], "seen": []}
    out: Tensor = model(2.0, hidden_states=hidden, extra=extra)
    return out, len(extra["seen"])


def test_the_devices_of_tensors_by_keyword_have_their_random_states_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for them among what it is given by position, and stashes the states of those devices."""
    asked: list[list[Tensor]] = []
    original = torch_checkpoint.get_device_states

    def spy(*args: Any) -> Any:
        asked.append([a for a in args if isinstance(a, Tensor)])
        return original(*args)

    monkeypatch.setattr(torch_checkpoint, "get_device_states", spy)
    monkeypatch.setattr(torch.cpu, "_initialized", True, raising=False)
    model, hidden, mask = Named(), torch.ones(5, 6), torch.ones(24)
    with under(model, Recompute(block="Named")):
        for _ in range(2):
            call(model, hidden, mask)
    assert len(asked) >= 2
    assert all({id(hidden), id(mask)} == set(map(id, tensors)) for tensors in asked[:1] + asked[-1:])


def test_a_block_that_is_given_no_tensor_of_its_device_names_it_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[set[str]] = []
    original = torch_checkpoint._infer_device_type

    def spy(*args: Any) -> str:
        kinds.append({a.device.type for a in args if isinstance(a, Tensor)})
        return original(*args)

    monkeypatch.setattr(torch_checkpoint, "_infer_device_type", spy)

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, device="meta"))

        def forward(self, size: int) -> Tensor:
            return torch.sin(self.weight * size)

    model = nn.Sequential(Grid())
    with under(model, Recompute(block="0")):
        model(3).sum().backward()
    assert kinds
    assert all("meta" in found for found in kinds)


def test_arguments_by_keyword_give_the_same_bits_and_lists_are_filled_once() -> None:
    torch.manual_seed(1)
    plain = Named()
    treated = copy.deepcopy(plain)
    mask = torch.rand(24, requires_grad=True)

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        out, num_seen = call(model, torch.ones(5, 6), mask)
        out.square().sum().backward()
        assert num_seen == 1
        found = [mask.grad, model.up.weight.grad, model.down.weight.grad]
        mask.grad = None
        model.zero_grad()
        return found

    with under(treated, Recompute(block="Named")):
        for _ in range(3):
            assert_same(step(treated), step(plain))


class Listing:
    """An engine that offloads nothing, and notes what it is offered."""

    def __init__(self) -> None:
        self.offered: list[Tensor] = []

    def group(self, *_: Any) -> Any:
        return nullcontext()

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        self.offered.append(tensor)
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        found: Tensor = packed
        return found

    def prefetch(self, key: Any) -> None:
        pass


def test_what_a_recomputed_block_is_given_by_keyword_is_offered_to_the_offload_once() -> None:
    model, hidden, mask = nn.ModuleDict({"block": Named()}), torch.ones(5, 6), torch.ones(24)
    engine = Listing()
    leaving = Offload(block="block", scope="inputs", tier="disk", min_bytes=0, window_bytes=0)
    executor = executor_of(model, Recompute(block="block"), leaving, engine=engine)
    executor.apply()
    call(model["block"], hidden, mask)
    executor.undo()
    offered = [tensor.data_ptr() for tensor in engine.offered]
    assert offered.count(hidden.data_ptr()) == offered.count(mask.data_ptr()) == 1
