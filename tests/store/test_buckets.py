"""Buckets: tensors of dictionaries that are on disk between uses, and come back as they were."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.buckets import BucketBuffer, DiskBucket, Entry, can_move, padded_bytes
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[TransferPool]:
    """Small blocks, so that a bucket takes several."""
    with TransferPool(ScratchFile(tmp_path), block_bytes=8 * KIB) as made:
        yield made


def moments() -> dict[str, Any]:
    """What an optimizer keeps of a parameter, in layouts and dtypes that differ."""
    made = torch.Generator().manual_seed(0)
    return {
        "step": torch.tensor(3.0),
        "contiguous": torch.randn(100, 33, generator=made),
        "transposed": torch.randn(64, 50, generator=made).t(),
        "half": torch.randn(4001, generator=made).to(torch.bfloat16),
        "double": torch.randn(17, 19, generator=made, dtype=torch.float64),
        "part": torch.randn(3000, generator=made)[500:2500],
    }


def entries_of(state: dict[str, Any]) -> list[Entry]:
    return [(state, key) for key, value in state.items() if can_move(value, 1024)]


def read_back(bucket: DiskBucket) -> BucketBuffer:
    buffer = BucketBuffer(bucket.num_bytes)
    bucket.begin_read(buffer)
    bucket.finish_read(buffer)
    return buffer


def equal(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(state) == list(wanted) and all(
        torch.equal(state[key], wanted[key]) and state[key].stride() == wanted[key].stride() for key in wanted
    )


def test_while_away_a_tensor_is_a_shape_without_numbers(pool: TransferPool) -> None:
    state = moments()
    DiskBucket(pool, "bucket 0").put_away(entries_of(state), None)
    assert state["step"].device.type == "cpu"
    assert {key for key, value in state.items() if value.is_meta} == set(state) - {"step"}
    assert (state["transposed"].shape, state["transposed"].dtype) == ((50, 64), torch.float32)
    with pytest.raises(RuntimeError, match="meta"):
        state["contiguous"].cpu()


def test_what_stands_for_a_tensor_moves_as_that_would(pool: TransferPool) -> None:
    """GIVEN a framework that moves all state at a run's end WHEN it is on disk THEN it stays, or is read."""
    state, wanted = moments(), moments()
    bucket = DiskBucket(pool, "b")
    bucket.put_away(entries_of(state), None)
    away = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.is_meta}
    assert away
    for key, value in away.items():
        assert value.to("cpu") is value.to(device=torch.device("cpu"), non_blocking=True) is value
        assert torch.equal(value.to("cpu", torch.float64), wanted[key].to(torch.float64))
        with pytest.raises(RuntimeError, match="meta"):
            value.sum().item()
    bucket.release()
    with pytest.raises(RuntimeError, match="meta"):
        next(iter(away.values())).to("cpu", torch.float64)


def test_tensors_come_back_with_their_bits_and_strides(pool: TransferPool) -> None:
    state, bucket = moments(), DiskBucket(pool, "bucket 0")
    bucket.put_away(entries_of(state), None)
    read_back(bucket)
    assert equal(state, moments())


def test_what_was_changed_in_place_is_written_from_where_it_was_read(pool: TransferPool) -> None:
    state, bucket = moments(), DiskBucket(pool, "bucket 0")
    bucket.put_away(entries_of(state), None)
    reserved_bytes = pool.scratch.used_bytes
    wanted = moments()
    for _ in range(3):
        buffer = read_back(bucket)
        for key, value in state.items():
            value.mul_(1.5).add_(1)
            wanted[key].mul_(1.5).add_(1)
        first = state["contiguous"]
        bucket.put_away(entries_of(state), buffer)
        bucket.wait_for_write()
        assert buffer.holds(first, 0)
        assert pool.scratch.used_bytes == reserved_bytes
    read_back(bucket)
    assert equal(state, wanted)


def test_tensors_that_were_replaced_added_or_taken_away_are_noticed(pool: TransferPool) -> None:
    state, bucket = moments(), DiskBucket(pool, "bucket 0")
    bucket.put_away(entries_of(state), None)
    buffer = read_back(bucket)
    state["contiguous"] = state["contiguous"] + 1  # no longer in the buffer
    state["new"] = torch.full((5000,), 7.0)
    del state["half"]
    wanted = {key: value.clone() if key != "transposed" else value.t().clone().t() for key, value in state.items()}
    bucket.put_away(entries_of(state), buffer)
    buffer.memory.fill_(255)
    assert state["new"].is_meta
    read_back(bucket)
    assert equal(state, wanted)


def test_what_an_owner_put_in_a_tensors_place_stays(pool: TransferPool) -> None:
    state, bucket = moments(), DiskBucket(pool, "bucket 0")
    bucket.put_away(entries_of(state), None)
    state["contiguous"] = None
    del state["half"]
    bucket.bring_back()
    assert state["contiguous"] is None
    assert "half" not in state
    assert torch.equal(state["transposed"], moments()["transposed"])


def test_copies_leave_the_tensors_away_and_bring_back_does_not(pool: TransferPool) -> None:
    state, bucket = moments(), DiskBucket(pool, "bucket 0")
    bucket.put_away(entries_of(state), None)
    copies = bucket.copies()
    copied = {key: copies.get(id(value), value) for key, value in state.items()}
    assert equal(copied, moments())
    assert state["contiguous"].is_meta
    assert copied["half"].untyped_storage().nbytes() == 4001 * 2  # its own bytes, not the bucket's
    bucket.bring_back()
    assert equal(state, moments())
    assert bucket.num_bytes == 0


def test_an_empty_bucket_moves_nothing(pool: TransferPool) -> None:
    bucket = DiskBucket(pool, "bucket 0")
    bucket.put_away([], None)
    bucket.finish_read(None)
    bucket.bring_back()
    assert pool.bytes_written == pool.bytes_read == bucket.num_bytes == 0


def expanded() -> Tensor:
    return torch.zeros(1, 500).expand(100, 500)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(100),
        torch.zeros(5000, requires_grad=True),
        torch.nn.Parameter(torch.zeros(5000)),
        expanded(),
        torch.zeros(100, 100)[:, ::2],
        torch.zeros(5000, device="meta"),
        torch.zeros(100, 100).to_sparse(),
        3.0,
        None,
    ],
    ids=["small", "requires grad", "parameter", "expanded", "strided", "meta", "sparse", "number", "none"],
)
def test_what_cannot_be_read_back_as_it_lies_does_not_move(value: object) -> None:
    assert not can_move(value, 1024)


def test_padding_leaves_each_tensor_a_boundary_of_64_bytes_and_the_bucket_one_of_4096() -> None:
    assert padded_bytes([]) == 0
    assert padded_bytes([1, 64]) == 4096
    assert padded_bytes([4096, 1]) == 8192


class FailingReads(SystemBackend):
    """A disk that takes bytes and does not give them back."""

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_read_names_the_bucket_and_leaves_the_tensors_away(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path, backend=FailingReads()), block_bytes=8 * KIB) as pool:
        state, bucket = moments(), DiskBucket(pool, "bucket 4 of the AdamW's state")
        bucket.put_away(entries_of(state), None)
        with pytest.raises(OffloadIOError, match=r"reading bucket 4 of the AdamW's state .* Input/output error"):
            bucket.bring_back()
        assert state["contiguous"].is_meta


def test_a_full_disk_leaves_the_tensors_in_memory(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path, capacity_bytes=8 * KIB), block_bytes=8 * KIB) as pool:
        state = moments()
        with pytest.raises(StoreError, match=r"more of disk are needed .* limit of 8.* KiB"):
            DiskBucket(pool, "bucket 0").put_away(entries_of(state), None)
        assert equal(state, moments())


def test_a_bucket_without_tensors_gives_its_place_back(pool: TransferPool) -> None:
    """Of a checkpoint's file, nobody would know that it is taken."""
    state = moments()
    bucket = DiskBucket(pool, "bucket 0")
    bucket.put_away([(state, "contiguous")], None)
    bucket.wait_for_write()
    assert pool.scratch.used_bytes > 0
    bucket.forget()
    bucket.put_away([], None)
    assert pool.scratch.used_bytes == 0
    state = moments()
    bucket.put_away([(state, "half")], None)
    assert next(iter(bucket.copies().values())).equal(moments()["half"])
