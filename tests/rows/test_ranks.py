"""Rows shared by ranks: two ranks train to the bits of one, and three go on from what two saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_ranks
from torch import Tensor

from memwall.rows.embedding import RowEmbedding

NUM_ROWS, DIM, BATCH = 4000, 16, 1440
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow(seconds=5), pytest.mark.timeout(300)]

COMMON = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from memwall.rows.embedding import RowEmbedding
from memwall.errors import ApplyError, StoreError
NUM_ROWS, DIM, BATCH = {sizes}
torch.set_num_threads(1)
folder, rank, num_ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))

def make(gradients, **settings):
    return RowEmbedding(NUM_ROWS, DIM, cache="256KiB", disk=folder, seed=7, gradients=gradients, **settings)

def train(table, optimizer, first, end):
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(BATCH, generator=generator) ** 2 * NUM_ROWS).long()
        weights = torch.randn(BATCH, DIM, generator=generator)
        mine = slice(BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks)
        optimizer.zero_grad()
        (table(ids[mine]) * weights[mine]).sum().backward()
        optimizer.step()
"""
TRAIN = """
table = make("sum")
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
table.prefetch(torch.arange(rank, 100))
train(table, optimizer, 0, 8)
assert table.store.bytes_read > 0
rows = table.rows(torch.arange(NUM_ROWS))
everywhere = [torch.empty_like(rows) for _ in range(num_ranks)]
dist.all_gather(everywhere, rows)
assert all(torch.equal(rows, other) for other in everywhere)
if rank == 0:
    torch.save(rows, f"{folder}/rows.pt")
    assert all(int(i) % 2 == 0 for ids, _ in table.store.every_record() for i in ids)
table.save(f"{folder}/saved")
try:
    table.save(f"{folder}/saved")
except StoreError as error:
    print(rank, error)
table.close()
"""
GO_ON = """
table = make("sum")
table.load(f"{folder}/saved")
assert torch.equal(table.rows(torch.arange(NUM_ROWS)), torch.load(f"{folder}/rows.pt"))
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
train(table, optimizer, 8, 12)
rows = table.rows(torch.arange(NUM_ROWS))
if rank == 0:
    torch.save(rows, f"{folder}/rows.pt")
"""
# Rank 1 has no ids of its own in the second step; the model's other parameters are replicated.
TOGETHER = """
try:
    make("mean", padding_idx=rank)
except ApplyError as error:
    print(rank, error)
model = torch.nn.Sequential(make("mean"), torch.nn.Linear(DIM, 1))
torch.nn.init.ones_(model[1].weight)
torch.nn.init.ones_(model[1].bias)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in model]
for ids in ([[1, 2, 3], [3, 4, 5]], [[1, 1], []], [[7], [8]]):
    for optimizer in optimizers:
        optimizer.zero_grad()
    (wrapped(torch.tensor(ids[rank], dtype=torch.long)).sum() * 3).backward()
    assert model[0].weight.grad is None
    for optimizer in optimizers:
        optimizer.step()
rows = model[0].rows(torch.arange(10))
if rank == 0:
    torch.save((rows, model[1].weight.detach()), f"{folder}/together.pt")
others = [torch.empty_like(model[1].weight) for _ in range(num_ranks)]
dist.all_gather(others, model[1].weight.detach())
assert torch.equal(*others)
"""
# Gloo's threads let go of the last collective's tensors by way of the interpreter: while that ends, they would abort
# the process (torch 2.13, ProcessGroupGloo::runLoop), and as long as DDP refers to a group, it is not destroyed.
END = """
sys.stdout.flush()
os._exit(0)
"""


def printed_by_ranks(folder: Path, script: str, num_ranks: int) -> list[str]:
    code = COMMON.replace("{sizes}", str((NUM_ROWS, DIM, BATCH))) + script + END
    return run_ranks(num_ranks, "-c", code, str(folder), folder=folder)


def train_alone(table: Any, optimizer: torch.optim.Optimizer, first: int, end: int) -> Tensor:
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(BATCH, generator=generator) ** 2 * NUM_ROWS).long()
        weights = torch.randn(BATCH, DIM, generator=generator)
        optimizer.zero_grad()
        (table(ids) * weights).sum().backward()
        optimizer.step()
    return table.rows(torch.arange(NUM_ROWS))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Returns what two ranks print that train a table, then one with replicated parameters; and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    return printed_by_ranks(folder, TRAIN + TOGETHER, 2), folder


def test_two_ranks_equal_one_and_three_go_on_from_what_they_saved(
    two_ranks: tuple[list[str], Path], tmp_path: Path
) -> None:
    alone = RowEmbedding(NUM_ROWS, DIM, cache="256KiB", disk=tmp_path, seed=7)
    optimizer = torch.optim.SparseAdam(alone.parameters(), lr=0.05)
    expected = train_alone(alone, optimizer, 0, 8)
    outputs, folder = two_ranks
    assert torch.equal(torch.load(folder / "rows.pt"), expected)
    for rank, output in enumerate(outputs):
        assert output.startswith(f"{rank} {folder}/saved exists already; save to a new folder\n")
    assert sorted(path.name for path in (folder / "saved").iterdir()) == [
        "shard-00000-of-00002.rows",
        "shard-00001-of-00002.rows",
    ]
    expected = train_alone(alone, optimizer, 8, 12)
    printed_by_ranks(folder, GO_ON, 3)
    assert torch.equal(torch.load(folder / "rows.pt"), expected)

    again = RowEmbedding(NUM_ROWS, DIM, cache="256KiB", disk=tmp_path, seed=8)
    again.load(folder / "saved")
    optimizer = torch.optim.SparseAdam(again.parameters(), lr=0.05)
    assert torch.equal(train_alone(again, optimizer, 8, 12), expected)
    again.close()
    alone.close()


def test_replicated_parameters_and_shared_rows_are_stepped_together(
    two_ranks: tuple[list[str], Path], tmp_path: Path
) -> None:
    outputs, folder = two_ranks
    for rank, output in enumerate(outputs):
        assert output.splitlines()[1].startswith(f"{rank} rank 1 makes a table of (4000, 16,")
    rows, head = torch.load(folder / "together.pt")

    table = RowEmbedding(NUM_ROWS, DIM, cache="256KiB", disk=tmp_path, seed=7)
    model = torch.nn.Sequential(table, torch.nn.Linear(DIM, 1))
    torch.nn.init.ones_(model[1].weight)
    torch.nn.init.ones_(model[1].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for ids in ([1, 2, 3, 3, 4, 5], [1, 1], [7, 8]):
        optimizer.zero_grad()
        (model(torch.tensor(ids)).sum() * 3 / 2).backward()
        optimizer.step()
    torch.testing.assert_close(rows, table.rows(torch.arange(10)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head, model[1].weight.detach(), rtol=1e-5, atol=1e-6)
    table.close()
