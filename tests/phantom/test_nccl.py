"""The phantom's NCCL: torch's own process group, between processes of this machine."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_ranks import on_ranks, trained
from torch import distributed
from torch.distributed import ReduceOp

pytestmark = [pytest.mark.phantom, pytest.mark.slow]
KINDS = {ReduceOp.SUM: sum, ReduceOp.MAX: max, ReduceOp.MIN: min, ReduceOp.AVG: lambda each: sum(each) / len(each)}


def mine(rank: int, dtype: torch.dtype = torch.float32, size: int = 70_000) -> torch.Tensor:
    """Returns what a rank has, in more parts than one; small whole numbers, which every type of numbers holds."""
    return ((torch.arange(size) + 3 * rank) % 5).to(dtype)


def reductions() -> list[str]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for kind, compute in KINDS.items():
            if kind == ReduceOp.AVG and not dtype.is_floating_point:
                continue
            found = mine(rank, dtype).cuda()
            distributed.all_reduce(found, kind)
            columns = torch.stack([mine(each, torch.float64) for each in range(size)])
            want = {sum: columns.sum(0), max: columns.amax(0), min: columns.amin(0)}.get(compute, columns.mean(0))
            if not torch.equal(found.cpu(), want.to(dtype)):
                wrong.append(f"{kind} of {dtype}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_every_kind_of_reduction_is_right_in_every_type(num_ranks: int) -> None:
    assert on_ranks(num_ranks, reductions) == [[]] * num_ranks


def movements() -> dict[str, Any]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own = torch.tensor([10.0 * rank, 10.0 * rank + 1], device="cuda")
    found: dict[str, Any] = {}
    gathered = torch.empty(2 * size, device="cuda")
    distributed.all_gather_into_tensor(gathered, own)
    found["gathered"] = gathered.tolist()
    scattered = torch.empty(2, device="cuda")
    distributed.reduce_scatter_tensor(scattered, torch.arange(2.0 * size, device="cuda"))
    found["scattered"] = scattered.tolist()
    broadcast = own.clone()
    distributed.broadcast(broadcast, 1)
    found["broadcast"] = broadcast.tolist()
    reduced = own.clone()
    distributed.reduce(reduced, 0)
    found["reduced"] = reduced.tolist() if rank == 0 else None
    exchanged = torch.empty(size, device="cuda")
    distributed.all_to_all_single(exchanged, torch.arange(float(size), device="cuda") + 10 * rank)
    found["exchanged"] = exchanged.tolist()
    # Both send before they receive, more than a mailbox holds: a group, as NCCL has it, goes on side by side.
    there = torch.empty(100_000, device="cuda")
    sends = distributed.P2POp(distributed.isend, torch.full((100_000,), float(rank), device="cuda"), (rank + 1) % size)
    receives = distributed.P2POp(distributed.irecv, there, (rank - 1) % size)
    for each in distributed.batch_isend_irecv([sends, receives]):
        each.wait()
    found["sent"] = there.unique().tolist()
    group = distributed.new_subgroups_by_enumeration([[0], list(range(1, size))])[0]
    found["group"] = (distributed.get_world_size(group), distributed.get_rank(group))
    distributed.all_reduce(own, group=group)
    found["in group"] = own.tolist()
    return found


@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=pytest.mark.phantom(order=order)) for order in ("lazy", "eager", "random")]
)
def test_what_is_moved_arrives(order: str) -> None:
    zero, one, two = on_ranks(3, movements)
    assert [each["gathered"] for each in (zero, one, two)] == [[0, 1, 10, 11, 20, 21]] * 3
    assert [each["scattered"] for each in (zero, one, two)] == [[0, 3], [6, 9], [12, 15]]
    assert [each["broadcast"] for each in (zero, one, two)] == [[10, 11]] * 3
    assert zero["reduced"] == [30, 33]
    assert [each["exchanged"] for each in (zero, one, two)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [each["sent"] for each in (zero, one, two)] == [[2], [0], [1]]
    assert [each["group"] for each in (zero, one, two)] == [(1, 0), (2, 0), (2, 1)]
    assert [each["in group"] for each in (zero, one, two)] == [[0, 1], [30, 32], [30, 32]]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_training_is_what_it_is_over_gloo(wrapper: str) -> None:
    """GIVEN two ranks with samples of their own THEN their weights are those of gloo's, bit for bit."""
    over_gloo = on_ranks(2, lambda: trained(wrapper), "gloo")
    over_nccl = on_ranks(2, lambda: trained(wrapper))
    assert over_gloo == over_nccl
    assert all(isinstance(rank, list) and len(rank) == 6 for rank in over_nccl)


@pytest.mark.phantom(order="eager", numbers=False)
def test_ranks_that_call_different_things_are_told() -> None:
    def work() -> None:
        own = torch.ones(4, device="cuda")
        distributed.all_reduce(own)
        distributed.all_reduce(own[: 4 - distributed.get_rank()])

    for found in on_ranks(2, work):
        assert "calls ncclAllReduce of 3 of type 7" in found
        assert "calls ncclAllReduce of 4 of type 7" in found


@pytest.mark.phantom(order="eager", numbers=False)
def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def work() -> str:
        own = torch.ones(4, device="cuda")
        distributed.all_reduce(own)
        if distributed.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(distributed.DistBackendError, match=r"rank 1 of 2 \(process \d+\) has ended"):
            distributed.all_reduce(own)
        assert time.monotonic() - began < 5
        return "told"

    before = set(Path("/dev/shm").glob("phantom-nccl-*"))
    found = on_ranks(2, work)
    assert found[1] == "ended"
    assert found[0] == "told"
    assert set(Path("/dev/shm").glob("phantom-nccl-*")) <= before
