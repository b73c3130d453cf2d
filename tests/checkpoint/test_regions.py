"""Any part of a divided tensor is put together from the parts that ranks hold, however many they were."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.checkpoint.committed import Region, Wanted, read_regions
from memwall.errors import StoreError

WHOLE = torch.arange(7 * 5).reshape(7, 5)


class Held:
    """Stands for the folder of a rank that holds one part of WHOLE."""

    def __init__(self, part: Tensor, offset: tuple[int, ...]) -> None:
        self.part, self.offset, self.num_reads = part, offset, 0
        self.records = {"parameter/weight": SimpleNamespace(shape=tuple(part.shape))}

    def region_of(self, _: Any) -> Region:
        return Region(tuple(WHOLE.shape), self.offset)

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


def test_of_replicas_one_is_read() -> None:
    sources = [Held(part, offset) for part, offset in [*parts(2, 0), *parts(2, 0)]]
    assert torch.equal(filled(sources, WHOLE.shape, (0, 0)), WHOLE)
    assert [source.num_reads for source in sources] == [1, 1, 0, 0]


def test_a_part_that_nobody_has_is_an_error() -> None:
    sources = [Held(part, offset) for part, offset in parts(2, 0)]
    with pytest.raises(StoreError, match="parameter weight is divided, and 15 of the 35 elements"):
        filled(sources[:1], WHOLE.shape, (0, 0))
