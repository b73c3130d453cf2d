"""`memwall.shard` on phantom devices, where torch's process group is NCCL's: what gloo does not do."""

from typing import Any

import pytest
import torch
from nccl_ranks import on_ranks
from sharded_runs import Model, batch, loss_of, network_for, ranked_plan
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import memwall
from memwall.predict.sharding.ddp import Ddp

pytestmark = [pytest.mark.phantom, pytest.mark.slow]
COMPRESSED = Ddp(are_views=True, is_compressed=True)


def by_plan(model: nn.Module) -> nn.Module:
    return memwall.shard(model, ranked_plan(COMPRESSED, network_for(2)))


def by_hand(model: nn.Module) -> nn.Module:
    divided = DistributedDataParallel(model, gradient_as_bucket_view=True)
    divided.register_comm_hook(None, bf16_compress_hook)
    return divided


def trained(divide: Any) -> list[float]:
    torch.manual_seed(0)
    model, tokens = divide(Model().cuda()), batch().cuda().add(distributed.get_rank()).remainder(2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.double().sum().item() for parameter in model.parameters()]


def test_a_plan_has_gradients_averaged_in_bfloat16() -> None:
    """GIVEN a plan that compresses gradients THEN ranks train as with torch's hook registered by hand, not as
    without."""

    def work() -> list[list[float]]:
        plain = trained(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
        return [trained(by_plan), trained(by_hand), plain]

    first, second = on_ranks(2, work)
    assert first == second
    planned, hooked, plain = first
    assert planned == hooked
    assert planned != plain
