"""What a table of rows does beside training: it leaves no trace, refuses what it cannot do, and stays small."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from row_tables import DIM, NUM_ROWS, OPTIMIZERS, Twins, assert_same_rows, ids_of, loss_of, opened, twins_of
from torch import Tensor, nn

from memwall.errors import ApplyError, StoreError, UsageError
from memwall.rows.embedding import RowEmbedding

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def twins(make: Callable[..., Any]) -> Callable[..., Twins]:
    return twins_of(make)


def test_looking_up_leaves_no_trace(make: Callable[..., Any]) -> None:
    table = make()
    before = (table.num_rows, table.memory_bytes, table.store.disk_bytes)
    table.eval()
    with torch.no_grad():
        out = table(torch.arange(NUM_ROWS))
    assert not out.requires_grad
    assert torch.equal(out, table(torch.arange(NUM_ROWS)))
    assert (table.num_rows, table.memory_bytes, table.store.disk_bytes) == before == (0, before[1], 0)


def test_inference_mode_leaves_nothing_that_training_stumbles_over(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SparseAdam(module.parameters())
        for step in range(3):
            with torch.inference_mode():
                assert module(ids_of(step, 40, 20)).shape == (40, 20, DIM)
                if module is ours:
                    ours.prefetch(ids_of(step + 1, 40, 20))
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
    assert_same_rows(ours, theirs)


def test_a_model_built_on_the_meta_device_has_its_rows(tmp_path: Path, twins: Callable[..., Twins]) -> None:
    with torch.device("meta"):
        ours = RowEmbedding(NUM_ROWS, DIM, cache="256KiB", disk=tmp_path, seed=7)
        optimizer = torch.optim.SparseAdam(ours.parameters())
    _, theirs = twins()
    with torch.device("meta"):
        for step in range(2):
            ids = torch.arange(step, 200, device="cpu")
            ours(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    other = torch.optim.SparseAdam(theirs.parameters())
    for step in range(2):
        theirs(torch.arange(step, 200)).sum().backward()
        other.step()
        other.zero_grad()
    assert_same_rows(ours, theirs)
    ours.close()


def test_two_tables_of_one_optimizer_are_stepped_both_or_none(make: Callable[..., Any]) -> None:
    first, second = make(), make(seed=8)
    optimizer = torch.optim.SparseAdam([*first.parameters(), *second.parameters()], lr=0.1)
    (first(torch.tensor([1])) * second(torch.tensor([2]))).sum().backward()
    optimizer.step()
    before = first.rows(torch.tensor([1]))
    (first(torch.tensor([1])) * second(torch.tensor([2]))).sum().backward()
    second.close()
    with pytest.raises(StoreError, match="can no longer be used: it has been closed"):
        optimizer.step()
    assert torch.equal(first.rows(torch.tensor([1])), before)
    assert first.num_rows == 1


def test_a_frozen_table_is_left_as_it_is(make: Callable[..., Any]) -> None:
    table = make()
    table.requires_grad_(False)
    head = nn.Linear(DIM, 1)
    head(table(torch.tensor([1, 2]))).sum().backward()
    torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1.0).step()
    assert table.num_rows == 0


def test_recomputed_lookups_are_counted_once(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for use_reentrant in (False, True):
            scale = torch.ones((), requires_grad=True)

            def block(scale: Tensor, module: Any = module) -> Tensor:
                return (loss_of(module, 2) * scale).sin()

            torch.utils.checkpoint.checkpoint(block, scale, use_reentrant=use_reentrant).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(ours, theirs)


def test_prefetched_rows_are_the_same_and_need_no_further_read(make: Callable[..., Any]) -> None:
    table = make()
    optimizer = torch.optim.SparseAdam(table.parameters())
    for first in range(0, NUM_ROWS, 500):
        table(torch.arange(first, first + 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = torch.arange(40)
    fetched = table.store.bytes_read
    table.prefetch(ids)
    assert table.store.bytes_read > fetched
    fetched = table.store.bytes_read
    table(ids)
    assert table.store.bytes_read == fetched


def test_a_step_that_fails_changes_no_row(make: Callable[..., Any]) -> None:
    table = make()
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    before = table.rows(torch.arange(10))
    handle = optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    assert torch.equal(table.rows(torch.arange(10)), before)
    optimizer.zero_grad()
    table(torch.tensor([2, 3])).sum().backward()
    optimizer.step()
    assert not torch.equal(table.rows(torch.arange(10)), before)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.AdamW(p), "AdamW cannot step a table of rows"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD with momentum=0.9 cannot step"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "Adagrad with weight_decay=0.1 cannot step"),
    ],
)
def test_an_optimizer_that_moves_untouched_rows_is_refused(
    make: Callable[..., Any], optimizer: Callable[[Any], torch.optim.Optimizer], words: str
) -> None:
    table = make()
    made = optimizer(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ApplyError, match=words):
        made.step()
    assert table.num_rows == 0


def test_another_optimizer_is_refused_where_rows_hold_state(make: Callable[..., Any]) -> None:
    table = make()
    for optimizer, is_first in ((OPTIMIZERS["SparseAdam"], True), (OPTIMIZERS["Adagrad"], False)):
        made = optimizer(table.parameters())
        table(torch.tensor([1])).sum().backward()
        if is_first:
            made.step()
        else:
            with pytest.raises(ApplyError, match=r"hold exp_avg \(16\), exp_avg_sq \(16\).*now keeps sum \(16\)"):
                made.step()


def test_a_fresh_optimizer_goes_on_counting_steps(twins: Callable[..., Twins]) -> None:
    ours, theirs = twins()
    theirs_optimizer = torch.optim.SparseAdam(theirs.parameters())
    for step in range(4):
        for module, optimizer in (
            (ours, torch.optim.SparseAdam(ours.parameters())),  # its moments lie with the rows
            (theirs, theirs_optimizer),
        ):
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
    assert_same_rows(ours, theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_table_cannot_be_copied(make: Callable[..., Any], copied: Callable[[Any], Any]) -> None:
    table = make()
    for thing in (nn.Sequential(table), table, table.weight):
        with pytest.raises(ApplyError, match="cannot be copied or pickled"):
            copied(thing)


def test_moves_to_a_device_leave_rows_and_other_dtypes_are_refused(make: Callable[..., Any]) -> None:
    model = nn.Sequential(make(), nn.Linear(DIM, 2))
    model.to("cpu").to("meta")
    assert model[1].weight.is_meta
    assert model[0](torch.tensor([1])).shape == (1, DIM)
    with pytest.raises(ApplyError, match=r"of torch.float32 cannot become one of torch.bfloat16; make it with dtype="):
        model.bfloat16()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_norm": 1.0}, "RowEmbedding has no max_norm"),
        ({"scale_grad_by_freq": True}, "RowEmbedding has no scale_grad_by_freq"),
        ({"sparse": False}, "RowEmbedding has no sparse=False"),
    ],
)
def test_what_needs_other_rows_is_refused(make: Callable[..., Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ApplyError, match=words):
        make(**settings)


def test_ids_outside_the_table_are_named(make: Callable[..., Any]) -> None:
    table = make()
    with pytest.raises(UsageError, match="ids from -1 to 3 were looked up in a table of 6000 rows"):
        table(torch.tensor([3, -1]))
    with pytest.raises(UsageError, match="and these are float32"):
        table(torch.tensor([1.0]))


def test_construction_takes_little_memory_whatever_the_size(tmp_path: Path) -> None:
    table = RowEmbedding(10**12, 64, disk=tmp_path, cache="64MiB")
    optimizer = torch.optim.SparseAdam(table.parameters())
    assert table.memory_bytes < 1 << 20
    table(torch.tensor([10**12 - 1, 5])).sum().backward()
    optimizer.step()
    assert table.num_rows == 2
    assert table.memory_bytes < 1 << 20
    table.close()


def test_memory_follows_the_rows_touched(tmp_path: Path) -> None:
    table = RowEmbedding(10**9, 64, disk=tmp_path, cache="512MiB")
    optimizer = torch.optim.SparseAdam(table.parameters())
    for step in range(10):
        ids = torch.arange(step * 2000, (step + 1) * 2000) * 49_999
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()
    record_bytes, index_bytes = 64 * 4 * 3, 23
    assert table.num_rows == 20_000
    assert table.memory_bytes <= 20_000 * (record_bytes * 1.1 + index_bytes)
    assert table.store.disk_bytes == 0
    table.close()
