"""Saving and loading a table: training goes on to the same bits, and no damaged or foreign file is taken for rows."""

import copy
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall.errors import ApplyError, OffloadIOError, StoreError, UsageError
from memwall.rows.embedding import RowEmbedding

NUM_ROWS, DIM = 5000, 16
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A table whose cache holds a fraction of its rows."""
    made: list[RowEmbedding] = []

    def table(num_rows: int = NUM_ROWS, dim: int = DIM, **settings: Any) -> RowEmbedding:
        made.append(RowEmbedding(num_rows, dim, **({"cache": "256KiB", "disk": tmp_path, "seed": 7} | settings)))
        return made[-1]

    yield table
    for module in made:
        module.close()


def train(table: Any, optimizer: torch.optim.Optimizer, first: int, end: int) -> Any:
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(900, generator=generator) ** 2 * NUM_ROWS).long()
        optimizer.zero_grad()
        table(ids).sin().sum().backward()
        optimizer.step()
    return table.rows(torch.arange(NUM_ROWS))


@pytest.fixture
def saved(make: Callable[..., Any], tmp_path: Path) -> Path:
    """A trained table's folder."""
    table = make()
    train(table, torch.optim.SparseAdam(table.parameters()), 0, 4)
    table.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.slow
def test_training_goes_on_to_the_same_bits(make: Callable[..., Any], tmp_path: Path) -> None:
    whole = make()
    optimizer = torch.optim.SparseAdam(whole.parameters(), lr=0.05)
    train(whole, optimizer, 0, 5)
    whole.save(tmp_path / "at5")
    states = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    expected = train(whole, optimizer, 5, 10)

    resumed = make(seed=99)
    resumed.load(tmp_path / "at5")
    resumed.load_state_dict(states[0])
    optimizer = torch.optim.SparseAdam(resumed.parameters(), lr=0.7)
    optimizer.load_state_dict(states[1])
    assert torch.equal(train(resumed, optimizer, 5, 10), expected)

    whole.load(tmp_path / "at5")  # back in time, in the same process
    optimizer.load_state_dict(states[1])
    back = torch.optim.SparseAdam(whole.parameters(), lr=0.05)
    assert torch.equal(train(whole, back, 5, 10), expected)


def test_a_bfloat16_table_comes_back(make: Callable[..., Any], tmp_path: Path) -> None:
    table = make(dtype=torch.bfloat16, padding_idx=3)
    rows = train(table, torch.optim.Adagrad(table.parameters()), 0, 3)
    table.save(tmp_path / "saved")
    other = make(dtype=torch.bfloat16, padding_idx=3)
    other.load(tmp_path / "saved")
    assert torch.equal(other.rows(torch.arange(NUM_ROWS)), rows)
    assert not rows[3].any()


def test_rows_without_their_state_take_another_optimizer(make: Callable[..., Any], saved: Path) -> None:
    table = make()
    table.load(saved, with_state=False)
    before = table.rows(torch.arange(NUM_ROWS))
    after = train(table, torch.optim.Adagrad(table.parameters(), initial_accumulator_value=0.5), 0, 1)
    twin = nn.Embedding(NUM_ROWS, DIM, sparse=True)
    twin.load_state_dict({"weight": before})
    optimizer = torch.optim.Adagrad(twin.parameters(), initial_accumulator_value=0.5)
    ids = (torch.rand(900, generator=torch.Generator().manual_seed(0)) ** 2 * NUM_ROWS).long()
    twin(ids).sin().sum().backward()
    optimizer.step()
    assert torch.equal(after, twin.weight.detach())


def test_an_optimizer_of_another_step_is_refused(make: Callable[..., Any], saved: Path) -> None:
    table = make()
    optimizer = torch.optim.SparseAdam(table.parameters())
    train(table, optimizer, 0, 2)
    table.load(saved)
    with pytest.raises(ApplyError, match="the SparseAdam has made 2 steps and the table's rows 4"):
        train(table, optimizer, 2, 3)


def test_an_optimizer_without_the_rows_it_trained_is_refused(make: Callable[..., Any]) -> None:
    trained, fresh = make(), make()
    optimizer = torch.optim.SparseAdam(trained.parameters())
    train(trained, optimizer, 0, 3)
    resumed = torch.optim.SparseAdam(fresh.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(ApplyError, match="the SparseAdam has made 3 steps and the table's rows 0"):
        train(fresh, resumed, 3, 4)
    assert fresh.num_rows == 0


def test_an_optimizers_state_of_a_dense_table_is_refused(make: Callable[..., Any]) -> None:
    dense, table = nn.Embedding(NUM_ROWS, DIM, sparse=True), make()
    theirs = torch.optim.SparseAdam(dense.parameters())
    dense(torch.tensor([1])).sum().backward()
    theirs.step()
    ours = torch.optim.SparseAdam(table.parameters())
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ApplyError, match=r"was given a state 'exp_avg' of shape \(5000, 16\)"):
        train(table, ours, 0, 1)


def test_a_state_dict_is_loaded_beside_its_own_rows_only(make: Callable[..., Any], saved: Path) -> None:
    model = nn.Sequential(make(), nn.Linear(DIM, 1))
    fresh = model.state_dict()
    assert set(fresh) == {"0.rows", "1.weight", "1.bias"}
    model.load_state_dict(fresh)
    model[0].load(saved)
    with pytest.raises(ApplyError, match=r"beside other rows for 0 \(after 0 updates\) than.*\(after 4 updates\)"):
        model.load_state_dict(fresh)
    later = model.state_dict()
    train(model[0], torch.optim.SparseAdam(model[0].parameters()), 0, 1)
    with pytest.raises(ApplyError, match=r"\(after 4 updates\) than the module has now \(after 5 updates\)"):
        model.load_state_dict(later)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({key: value for key, value in fresh.items() if key != "0.rows"})


def test_a_dense_table_is_taken_over(make: Callable[..., Any]) -> None:
    dense = nn.Embedding(NUM_ROWS, DIM, sparse=True)
    table = make()
    table.load_state_dict(dense.state_dict())
    assert table.num_rows == NUM_ROWS
    optimizers = [torch.optim.SparseAdam(module.parameters()) for module in (table, dense)]
    train(table, optimizers[0], 0, 3)
    for step in range(3):
        ids = (torch.rand(900, generator=torch.Generator().manual_seed(step)) ** 2 * NUM_ROWS).long()
        optimizers[1].zero_grad()
        dense(ids).sin().sum().backward()
        optimizers[1].step()
    assert torch.equal(table.rows(torch.arange(NUM_ROWS)), dense.weight.detach())
    with pytest.raises(UsageError, match=r"a weight of shape \(3, 16\) was loaded into a table of 5000 x 16"):
        table.load_state_dict({"weight": torch.zeros(3, DIM)})


def shard(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def cut_before_the_end_mark(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 16)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 4
        path.write_bytes(data)

    return change


def replace(path: Path) -> None:
    path.write_bytes(b"something else entirely, and long enough to be read")


def claim_more(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = 16 + struct.unpack_from("<I", data, 8)[0]
    struct.pack_into("<I", data, start, 1 << 31)
    path.write_bytes(data)


def rename(path: Path) -> None:
    path.rename(path.with_name("shard-00000-of-00002.rows"))


def double(path: Path) -> None:
    shutil.copy(path, path.with_name("shard-00001-of-00002.rows"))
    rename(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "was cut short"),
        (cut_before_the_end_mark, "was cut short"),
        (lengthen, "the checksum of its end mark"),
        (flip(9000), "the checksum of the rows from number 0 on"),
        (flip(-5000), "the checksum of the rows from number"),
        (flip(-1), "the checksum of"),
        (flip(20), "the checksum of its header"),
        (flip(2), "it does not begin with MWROWS01"),
        (replace, "it does not begin with MWROWS01"),
        (claim_more, "was cut short"),
        (rename, "should hold shards 0 to 1 of 2, and holds shard-00000-of-00002.rows"),
        (double, "is not of the same save as shard-00000-of-00002.rows, or was renamed"),
        (Path.unlink, "holds no shards of a table of rows"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused_and_the_table_stays(
    make: Callable[..., Any], saved: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(shard(saved))
    table = make()
    before = train(table, torch.optim.SparseAdam(table.parameters()), 0, 2)
    with pytest.raises(StoreError, match=words):
        table.load(saved)
    assert torch.equal(table.rows(torch.arange(NUM_ROWS)), before)
    train(table, torch.optim.SparseAdam(table.parameters()), 2, 3)


def test_every_flipped_bit_is_found(make: Callable[..., Any], saved: Path) -> None:
    path = shard(saved)
    size = path.stat().st_size
    table = make()
    for offset in [*range(40), *range(40, size, size // 25), *range(size - 17, size)]:
        flip(offset)(path)
        with pytest.raises(StoreError):
            table.load(saved)
        flip(offset)(path)
    table.load(saved)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_rows": 100}, "is of a table of 5000 x 16 float32 .* this one is 100 x 16"),
        ({"dim": 8}, "this one is 5000 x 8 float32"),
        ({"dtype": torch.bfloat16}, "this one is 5000 x 16 bfloat16"),
        ({"padding_idx": 0}, "with padding_idx=None, and this one .* with padding_idx=0"),
    ],
)
def test_rows_of_another_table_are_refused(
    make: Callable[..., Any], saved: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(StoreError, match=words):
        make(**settings).load(saved)


def test_a_full_disk_leaves_no_folder(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    train(table, torch.optim.SparseAdam(table.parameters()), 0, 2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OffloadIOError, match=r"No space left on device \(errno 28\); free space there") as caught:
            table.save(tmp_path / "saved")
    assert caught.value.errno == 28
    assert not (tmp_path / "saved").exists()
    table.save(tmp_path / "saved")  # what the failed one left does not stand in the way
    make().load(tmp_path / "saved")
