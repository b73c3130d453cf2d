"""Blocks whose `parameters` is a method of their own: recomputed, watched, matched and divided by all they have."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from sharded_runs import network_for, ranked_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memwall.apply.block_technique import _own_weight
from memwall.apply.kernels.match import candidates, disagreement
from memwall.apply.shard import shard
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.sharding.fsdp2 import Fsdp2


class Learner(nn.Module):
    """A learner of MAML, as others write it: `parameters` is its own, and takes nothing."""

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.shared = nn.Parameter(torch.eye(4)) if shared is None else shared

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return []

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(values @ self.weight) @ self.shared


class GatedLearner(nn.Module):
    """A gated network, of which fused kernels know the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.down_proj, self.act_fn = nn.Linear(8, 4, bias=False), nn.SiLU()

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return []

    def forward(self, values: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(values)) * self.up_proj(values))


def test_it_is_recomputed(
    recomputed: Callable[..., AbstractContextManager[None]],
    after_a_step: Callable[..., dict[str, Tensor]],
    assert_same_bits: Callable[..., None],
) -> None:
    model, values = nn.Sequential(nn.Linear(4, 4), Learner()), torch.ones(2, 4)
    plain = after_a_step(model, lambda: model(values).sum())
    with recomputed(model, Recompute(block="1")):
        assert_same_bits(after_a_step(model, lambda: model(values).sum()), plain)


def test_its_backward_is_seen_by_a_weight_of_its_own() -> None:
    model = nn.Sequential(Learner(), nn.Linear(4, 2))
    assert _own_weight(model, model[0]) is model[0].weight


def test_its_fused_kernel_is_compared_in_its_dtype() -> None:
    block = GatedLearner()
    assert [disagreement(block, found) for found in candidates(block)] == [None]


def test_what_it_shares_is_gathered_by_the_root(one_rank: None) -> None:
    first = Learner()
    model = nn.Sequential(first, Learner(first.shared))
    shard(model, ranked_plan(Fsdp2(), network_for(1), units=("0", "1")))
    assert isinstance(model[0].weight, DTensor)
    assert model[0].shared is model[1].shared
    out = model(torch.ones(2, 4)).sum()
    out.backward()
    assert out.item() == pytest.approx(2 * 4 * torch.tanh(torch.tanh(torch.tensor(1.0))).item())
