"""Any part of a divided tensor is put together from the parts that ranks hold, however many they were."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.checkpoint.committed import Committed, Region, Wanted, read_regions
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.training_state import TensorRecord
from memwall.errors import StoreError

WHOLE = torch.arange(7 * 5).reshape(7, 5)


class Held:
    """Stands for the folder of a rank that holds one part of WHOLE."""

    def __init__(self, part: Tensor, offset: tuple[int, ...] | None) -> None:
        self.part, self.offset, self.num_reads = part, offset, 0
        self.records = {"parameter/weight": SimpleNamespace(shape=tuple(part.shape))}

    def region_of(self, _: Any) -> Region | None:
        return None if self.offset is None else Region(tuple(WHOLE.shape), self.offset)

    def read(self, targets: Iterable[tuple[Any, tuple[slice, ...], Tensor]]) -> None:
        for _, part, tensor in targets:
            self.num_reads += 1
            tensor.copy_(self.part[part])


def parts(num_ranks: int, dim: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """As torch.chunk divides, where later ranks may get nothing."""
    chunk = -(-WHOLE.shape[dim] // num_ranks)
    for rank in range(num_ranks):
        begin = min(rank * chunk, WHOLE.shape[dim])
        part = WHOLE.narrow(dim, begin, min(chunk, WHOLE.shape[dim] - begin))
        yield part, (begin, 0) if dim == 0 else (0, begin)


def filled(sources: Sequence[Held], shape: torch.Size, offset: tuple[int, ...]) -> Tensor:
    tensor = torch.full(shape, -1)
    region = Region(tuple(WHOLE.shape), offset)
    read_regions(sources, [Wanted("parameter/weight", tensor, region)])  # type: ignore[arg-type]
    return tensor


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product([(1, 0), (2, 0), (4, 0), (3, 1), (9, 0)], repeat=2))
)
def test_each_rank_gets_its_part(before: tuple[int, int], after: tuple[int, int]) -> None:
    sources = [Held(part, offset) for part, offset in parts(*before)]
    for part, offset in parts(*after):
        assert torch.equal(filled(sources, part.shape, offset), part)


def test_a_part_is_read_from_a_whole() -> None:
    """GIVEN folders that each have all of it, as of DistributedDataParallel THEN a rank of FSDP2 takes its part."""
    for part, offset in parts(2, 0):
        assert torch.equal(filled([Held(WHOLE, None)] * 2, part.shape, offset), part)


def of_one_row(*, is_divided: bool) -> Any:
    """Returns a restoration from the folders of four ranks that have a row each, or all of it."""
    made: Any = object.__new__(Restoration)
    rows = WHOLE[:4].split(1)
    made._sources = [
        Held(row if is_divided else WHOLE[:4], (rank, 0) if is_divided else None) for rank, row in enumerate(rows)
    ]
    made._own, made._regions = made._sources[0], {}
    return made


def test_a_whole_is_put_together_from_parts() -> None:
    """GIVEN shards of one row each WHEN a process without FSDP2 goes on THEN none is repeated into the whole."""
    made, tensor = of_one_row(is_divided=True), torch.full((7, 5), -1)
    record = SimpleNamespace(name="parameter/weight", shape=(1, 5))
    made._sources = [*made._sources, Held(WHOLE[4:], (4, 0))]
    made._read([(record, tensor)])
    assert torch.equal(tensor, WHOLE)


def test_a_part_is_taken_of_what_was_not_divided() -> None:
    made, tensor = of_one_row(is_divided=False), torch.full((2, 5), -1)
    made._regions = {"weight": Region((4, 5), (2, 0))}
    weight = SimpleNamespace(name="parameter/weight", shape=(4, 5))
    made._read([(weight, tensor)])
    assert torch.equal(tensor, WHOLE[2:4])
    assert made._here(SimpleNamespace(name="state/0/step/weight", shape=())) is None


def test_a_shape_that_is_not_the_records_is_an_error() -> None:
    """GIVEN a part of one row and a whole that copy_ would fill with it THEN nothing is read into it."""
    held: Any = object.__new__(Committed)
    row = torch.arange(5.0)
    held.journal = SimpleNamespace(
        directory="steps", pool=SimpleNamespace(read=lambda *_, **__: SimpleNamespace(wait=int))
    )
    held._found, held.step = SimpleNamespace(buckets=[SimpleNamespace(num_bytes=4096, slot=None)]), 3
    record = TensorRecord(
        name="parameter/w", dtype="float32", shape=(1, 5), stride=(5, 1), is_on_host=True, bucket=0, offset=0
    )
    with pytest.raises(StoreError, match=r"parameter w was committed with shape \[1, 5\], and is wanted with \[4, 5\]"):
        held.read([(record, (), row.expand(4, 5).clone())])


def test_of_replicas_one_is_read() -> None:
    sources = [Held(part, offset) for part, offset in [*parts(2, 0), *parts(2, 0)]]
    assert torch.equal(filled(sources, WHOLE.shape, (0, 0)), WHOLE)
    assert [source.num_reads for source in sources] == [1, 1, 0, 0]


def test_a_part_that_nobody_has_is_an_error() -> None:
    sources = [Held(part, offset) for part, offset in parts(2, 0)]
    with pytest.raises(StoreError, match="parameter weight is divided, and 15 of the 35 elements"):
        filled(sources[:1], WHOLE.shape, (0, 0))
