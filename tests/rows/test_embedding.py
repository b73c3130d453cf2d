"""A table of rows trains to the same bits as `torch.nn.Embedding(sparse=True)`, however it is used and optimized."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import every_pair, every_value
from row_tables import DIM, NUM_ROWS, OPTIMIZERS, Twins, assert_same_rows, ids_of, loss_of, opened, twins_of
from torch import Tensor, nn

from memwall.rows.embedding import RowEmbedding, RowEmbeddingBag

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def twins(make: Callable[..., Any]) -> Callable[..., Twins]:
    return twins_of(make)


@pytest.mark.parametrize(
    ("name", "dtype"), every_value(list(OPTIMIZERS), {"float32": torch.float32, "bfloat16": torch.bfloat16})
)
@pytest.mark.slow
def test_twenty_steps_are_bit_equal_though_rows_are_evicted(
    twins: Callable[..., Twins], name: str, dtype: torch.dtype
) -> None:
    ours, theirs = twins(dtype=dtype)
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for step in range(20):
        losses = []
        for module, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(module, step)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert_same_rows(ours, theirs)
    state = optimizers[1].state[theirs.weight]
    columns = ours.store.layout.state
    start = DIM
    records = ours.store.records(torch.arange(NUM_ROWS))
    for column in columns:
        assert torch.equal(records[:, start : start + column.width], state[column.name])
        start += column.width
    must_evict = ours.num_rows * ours.store.layout.row_bytes > 256 << 10
    assert must_evict or (name == "SGD" and dtype is torch.bfloat16)
    assert (ours.store.bytes_read > 0, ours.store.bytes_written > 0) == (must_evict, must_evict)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_accumulate_over_backwards_and_uses(twins: Callable[..., Twins], name: str) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = OPTIMIZERS[name](module.parameters())
        for step in range(0, 12, 4):
            first, second = loss_of(module, step), loss_of(module, step + 1)
            (first * second + loss_of(module, step + 3)).backward()  # three uses in one graph
            loss_of(module, step + 2).backward()  # and a second graph before the step
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(ours, theirs)


def test_forwards_before_backwards_across_a_step(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        early, late = loss_of(module, 0), loss_of(module, 1)
        late.backward()
        optimizer.step()  # the rows of `early` have changed, its graph has their old values
        early.backward()
        optimizer.step()  # without zero_grad: the first gradient counts once more
    assert_same_rows(ours, theirs)


def test_a_gradient_can_be_clipped_with_the_rest_of_the_model(make: Callable[..., Any]) -> None:
    table = make()
    dense = nn.Linear(DIM, 1)
    reference = nn.Embedding(NUM_ROWS, DIM)
    reference.load_state_dict({"weight": table.rows(torch.arange(NUM_ROWS))})
    twin = copy.deepcopy(dense)
    norms = []
    for embedding, head in ((table, dense), (reference, twin)):
        head(embedding(ids_of(0, 30, 5))).pow(2).sum().backward()
        norms.append(nn.utils.clip_grad_norm_([*embedding.parameters(), *head.parameters()], 0.01))
        torch.optim.SGD(embedding.parameters(), lr=1.0).step()
    assert torch.allclose(*norms, rtol=1e-6)
    assert torch.allclose(table.rows(torch.arange(NUM_ROWS)), reference.weight.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("has_data", [False, True])
def test_a_gradient_that_was_scaled_in_place_is_the_one_that_is_stepped(
    make: Callable[..., Any], has_data: bool
) -> None:
    table = make()
    before = table.rows(torch.tensor([3, 5]))
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([3, 5, 3])).sum().backward()
    assert table.weight.grad.tolist() == [[2.0] * DIM, [1.0] * DIM]
    (table.weight.grad.data if has_data else table.weight.grad).mul_(0.5)
    table(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert torch.equal(table.rows(torch.tensor([3, 5])), before - torch.tensor([[1.0], [1.5]]))


def test_a_gradient_scaler_unscales_rows(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler.scale(loss_of(ours, 0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    theirs_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    loss_of(theirs, 0).backward()
    theirs_optimizer.step()
    torch.testing.assert_close(ours.rows(torch.arange(NUM_ROWS)), theirs.weight.detach(), rtol=0, atol=1e-6)


def test_a_backward_that_broke_off_leaves_no_gradient(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        early = module(ids_of(0, 5))
        early.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (early.sum() + module(ids_of(1, 5)).sum()).backward()
        optimizer.zero_grad()
        loss_of(module, 2).backward()
        optimizer.step()
    assert_same_rows(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_move_no_row(twins: Callable[..., Twins], set_to_none: bool) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        for step in range(3):
            loss_of(module, step).backward()
            optimizer.step()
        assert module.weight.grad is not None
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        loss_of(module, 5).backward()
        optimizer.step()
    assert_same_rows(ours, theirs)


def test_a_closure_is_called_once_and_its_gradient_stepped(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters())
        calls = []

        def closure(module: Any = module, optimizer: Any = optimizer, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = loss_of(module, 0)
            loss.backward()
            return loss

        before = loss_of(module, 0).item()
        assert optimizer.step(closure).item() == before
        assert len(calls) == 1
    assert_same_rows(ours, theirs)


def test_padding_is_zero_and_stays(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins(padding_idx=-1)
    ids = torch.tensor([[NUM_ROWS - 1, 4], [4, NUM_ROWS - 1]])
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters())
        for _ in range(3):
            module(ids).sum().backward()
            optimizer.step()
    assert_same_rows(ours, theirs)
    assert not ours(torch.tensor([NUM_ROWS - 1])).any()
    assert ours.num_rows == 1


@pytest.mark.parametrize(("name", "mode", "padding_idx"), every_pair(list(OPTIMIZERS), ["sum", "mean"], [None, 0]))
def test_bags_are_bit_equal(twins: Callable[..., Twins], name: str, mode: str, padding_idx: int | None) -> None:
    ours, theirs = twins(RowEmbeddingBag, mode=mode, padding_idx=padding_idx)
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in (ours, theirs)]
    for step in range(6):
        ids, offsets = ids_of(step, 700), torch.arange(0, 700, 7) // (1 + step % 2)  # later ones have empty bags
        if step % 2 == 0:
            ids, offsets = ids.view(100, 7), None
        outs = []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            out = module(ids, offsets)
            out.sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out.detach())
        assert torch.equal(*outs)
    assert_same_rows(ours, theirs)


def test_per_sample_weights_get_their_gradient(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins(RowEmbeddingBag, mode="sum", include_last_offset=True)
    ids, offsets = ids_of(0, 60), torch.tensor([0, 20, 20, 60])
    gradients = []
    for module in (ours, theirs):
        weights = torch.linspace(-1, 1, 60, requires_grad=True)
        module(ids, offsets, weights).pow(2).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        gradients.append(weights.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert_same_rows(ours, theirs)


def test_the_maximum_of_a_bag_trains_as_a_dense_table_does(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins(RowEmbeddingBag, mode="max")
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            module(ids_of(step, 50, 4)).pow(2).sum().backward()
            optimizer.step()
    assert_same_rows(ours, theirs)


@pytest.mark.parametrize("kind", [RowEmbedding, RowEmbeddingBag])
def test_no_ids_at_all(twins: Callable[..., Twins], kind: Any) -> None:
    ours, theirs = twins(kind)
    nothing = (torch.empty(0, dtype=torch.long), *([torch.tensor([0, 0])] if kind is RowEmbeddingBag else []))
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters())
        module(*nothing).sum().backward()
        optimizer.step()
        module(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    assert torch.equal(ours(*nothing), theirs(*nothing))
    assert_same_rows(ours, theirs)
