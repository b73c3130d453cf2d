"""The names of the reducer of torch's distributed data parallel do what is said of them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from memwall.torch_internals import modules, reducer

pytestmark = pytest.mark.usefixtures("one_rank")


def test_distributed_data_parallel_says_when_it_has_made_its_buckets_anew() -> None:
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    waits, buckets = [], []
    for _ in range(3):
        parallel(torch.ones(2, 4)).sum().backward()
        waits.append(modules.waits_for_new_buckets(parallel))
        buckets.append(reducer.buckets_of(parallel))
    reducer.make_buckets(parallel, [[each] for each in parallel.parameters()])
    for _ in range(3):
        parallel(torch.ones(2, 4)).sum().backward()
    weight, bias = parallel.parameters()
    assert waits == [True, False, False]
    assert buckets[0] == []
    assert [list(map(id, bucket)) for bucket in buckets[-1]] == [[id(bias), id(weight)]]
    assert float(weight.grad.sum()) == 6 * 2 * 4  # each step of both reducers adds to it
    assert not modules.waits_for_new_buckets(nn.Linear(1, 1))


def test_gradients_are_reduced_after_a_backward_without_that() -> None:
    """GIVEN a gradient of negative zero WHEN the reducer takes it later THEN it keeps its sign."""
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    (weight,) = parallel.parameters()
    for value in (-0.0, 3.0, -0.0):
        reducer.meet_before_forward(parallel)
        with parallel.no_sync():
            parallel(torch.ones(1, 2)).sum().backward()
        assert weight.grad is not None
        weight.grad.fill_(value)
        reducer.reduce_gradients(parallel)
        assert weight.grad.tolist() == [[value, value]]
        assert bool(weight.grad.signbit().all()) == (value < 1)
        weight.grad = None


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", ""])
def test_gradients_are_not_reduced_later_where_that_would_be_something_else(option: str) -> None:
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), **({option: True} if option else {}))
    assert reducer.is_reducible(parallel) == (not option)
    parallel.module.bias.register_post_accumulate_grad_hook(lambda _: None)
    assert not reducer.is_reducible(parallel)


def test_a_reducer_with_a_communication_hook_is_kept_as_it_is() -> None:
    """GIVEN gradients that a hook of the script compresses WHEN buckets are to be made THEN none is lost with them."""
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for _ in range(3):
        parallel(torch.ones(2, 4)).sum().backward()
    before = parallel.reducer
    assert reducer.buckets_of(parallel) == []
    assert not reducer.make_buckets(parallel, [[*parallel.parameters()]])
    assert parallel.reducer is before
