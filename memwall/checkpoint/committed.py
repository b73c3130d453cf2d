"""One committed step as it is in a folder: tensors, the part of a whole that each is, and the small rest.

A tensor that FSDP2 divides is in the folders of several ranks. Each commits where its part lies in the whole, so that
another number of ranks, or a file, gets any other part from those that hold a piece of it.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct, field
from torch import Tensor

from memwall.apply.memory.exhaustion import is_exhaustion
from memwall.checkpoint.training_state import TensorRecord, check_records, decode_objects, state_name
from memwall.errors import StoreError
from memwall.store.buckets import BucketBuffer
from memwall.store.generation import Generation
from memwall.store.journal import Journal

_NEEDED = {"optimizer", "helpers", "random", "loop", "state_dict"}


class _Group(Struct):
    """Is what is read of a group of an optimizer."""

    parameters: list[str]
    options: dict[str, Any]


class _Optimizer(Struct):
    """Is what is read of an optimizer."""

    name: str = field(name="class")
    groups: list[_Group]
    state: dict[str, dict[Any, Any]]


class _Objects(Struct):
    """Is what is read of a step beside its tensors, whoever wrote it."""

    optimizer: _Optimizer
    state_dict: dict[str, str]
    helpers: list[tuple[str, dict[Any, Any]]]
    further_optimizers: list[_Optimizer] = []


def _check(objects: Mapping[str, Any], records: Container[str]) -> None:
    """Checks what a step has beside its tensors: a file may be a stranger's."""
    found = msgspec.convert(objects, _Objects)
    for name in found.state_dict.values():
        if name not in records:
            raise ValueError(f"its state dict has {name!r}, of which there is no tensor")


class Content(Struct, frozen=True, kw_only=True):
    """Holds what a run puts into a generation of the journal."""

    tensors: tuple[TensorRecord, ...]
    objects: bytes
    plan: bytes | None
    """The plan file that was in effect."""
    torch_version: str = ""
    """The release of torch that committed it; "" where an earlier memwall did."""


class Region(NamedTuple):
    """Says which part of a divided tensor one rank holds, in elements along each dimension."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]


def whole_region(shape: Sequence[int]) -> Region:
    """Returns the region that is all of a tensor."""
    return Region(tuple(shape), (0,) * len(shape))


class Wanted(NamedTuple):
    """Names a committed tensor, and where it is to be put: as it was committed, or a region of the whole."""

    name: str
    tensor: Tensor
    region: Region | None = None


class Committed:
    """Holds the step that one process has committed.

    Args:
        journal: reads the buckets.
        found: the generation.

    Attributes:
        records: where each tensor is, by name.
        optimizers: of each its class, options, and what of its state is no tensor.
        objects: the rest of the step; see `memwall.checkpoint.training_state`.

    Raises:
        StoreError: the step was committed by another version of memwall.
    """

    def __init__(self, journal: Journal, found: Generation) -> None:
        self.journal, self._found, self.step = journal, found, found.step
        try:
            self.content = msgspec.msgpack.decode(found.content, type=Content)
            check_records(self.content.tensors, [stored.num_bytes for stored in found.buckets])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise self.written_by_another(error) from error
        with self.loading("its objects"):
            self.objects = decode_objects(self.content.objects)
        if not isinstance(self.objects, dict):
            raise self.written_by_another(ValueError(f"its objects are {type(self.objects).__name__}, not dict"))
        missing = sorted(_NEEDED - self.objects.keys())
        if missing:
            raise self.written_by_another(ValueError(f"it has no {', '.join(missing)}"))
        self.records = {record.name: record for record in self.content.tensors}
        try:
            _check(self.objects, self.records)
        except (msgspec.ValidationError, ValueError) as error:
            raise self.written_by_another(error) from error
        self.optimizers: list[dict[str, Any]] = [
            self.objects["optimizer"],
            *self.objects.get("further_optimizers", ()),
        ]
        self._divided: Mapping[str, Any] = self.objects.get("divided", {})
        if self.objects.get("is_divided"):
            raise self.written_by_another(ValueError("it does not say which part of the whole each tensor is"))

    def written_by_another(self, error: Exception) -> StoreError:
        """Returns an error for a step that this version cannot read."""
        return StoreError(
            f"step {self.step} in {self.journal.directory} was committed by another version of memwall "
            f"({error}); resume with the one that wrote it"
        )

    @property
    def other_release(self) -> str:
        """Names both releases of torch where another one than this has committed the step; else ""."""
        before, here = self.content.torch_version, str(torch.__version__)
        return "" if before in ("", here) else f"it was committed under torch {before}, and this is torch {here}"

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Has what fails while a part of the step is loaded end in one error, where another release committed it.

        Raises:
            StoreError: this release of torch cannot load what the other one saved.
        """
        try:
            yield
        except Exception as error:
            if not self.other_release or isinstance(error, StoreError) or is_exhaustion(error):
                raise
            raise StoreError(
                f"step {self.step} in {self.journal.directory} cannot be continued from: {self.other_release}, which "
                f"cannot load {what} ({type(error).__name__}: {error}); resume with that release"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes were written, and have been verified."""
        return sum(stored.num_bytes for stored in self._found.buckets)

    def region_of(self, record: TensorRecord) -> Region | None:
        """Returns which part of a divided tensor a record is; None of a whole one."""
        of_state = state_name(record)
        if of_state is not None:
            number, key, name = of_state
            if key not in self.optimizers[number].get("sharded", {}).get(name, ()):
                return None
        found = self._divided.get(parameter_of(record))
        return None if found is None else Region(tuple(found[0]), tuple(found[1]))

    def whole_shape(self, record: TensorRecord) -> tuple[int, ...]:
        """Returns the shape of the tensor that a record is or is a part of."""
        region = self.region_of(record)
        return record.shape if region is None else region.whole

    def read(self, targets: Iterable[tuple[TensorRecord, tuple[slice, ...], Tensor]]) -> None:
        """Fills tensors with a part of what is recorded, a bucket at a time.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        by_bucket: dict[int, list[tuple[TensorRecord, tuple[slice, ...], Tensor]]] = {}
        for target in targets:
            by_bucket.setdefault(target[0].bucket, []).append(target)
        for number, members in sorted(by_bucket.items()):
            stored = self._found.buckets[number]
            buffer = BucketBuffer(stored.num_bytes)
            label = f"the bucket of {members[0][0].name.replace('/', ' ')}"
            view = buffer.view(stored.num_bytes)
            self.journal.pool.read(stored.slot, view, label=label, keep=buffer.memory).wait()
            for record, part, tensor in members:
                dtype = getattr(torch, record.dtype)
                like = torch.empty_strided(record.shape, record.stride, dtype=dtype, device="meta")
                piece = buffer.tensor(record.offset, like)[part]
                if piece.shape != tensor.shape:  # copy_ would repeat a part of one row
                    raise StoreError(
                        f"{record.name.replace('/', ' ')} was committed with shape {list(piece.shape)}, and is wanted "
                        f"with {list(tensor.shape)}; resume with the number of ranks, and the way to divide, of step "
                        f"{self.step} in {self.journal.directory}"
                    )
                tensor.copy_(piece)


def parameter_of(record: TensorRecord) -> str:
    """Returns the name of the parameter that a record is, or is an optimizer's state of; "" of another tensor."""
    of_state = state_name(record)
    kind, _, name = record.name.partition("/")
    return of_state[2] if of_state is not None else name if kind == "parameter" else ""


def read_regions(sources: Sequence[Committed], targets: Iterable[Wanted]) -> None:
    """Fills tensors from what several ranks have committed.

    Args:
        sources: that of the rank whose whole tensors are wanted comes first.

    Raises:
        StoreError: the bytes cannot be had, or a piece of a divided tensor is in none of the folders.
    """
    wanted: list[list[tuple[TensorRecord, tuple[slice, ...], Tensor]]] = [[] for _ in sources]
    for target in targets:
        region = target.region
        if region is None:
            number = next(number for number, source in enumerate(sources) if target.name in source.records)
            wanted[number].append((sources[number].records[target.name], (), target.tensor))
            continue
        num_left, seen = target.tensor.numel(), set()
        for number, source in enumerate(sources):
            record = source.records.get(target.name)
            if record is None:
                continue
            held = source.region_of(record) or whole_region(record.shape)
            if held in seen:  # replicas hold the same part
                continue
            seen.add(held)
            common = _common(held.offset, record.shape, region.offset, tuple(target.tensor.shape))
            if common is not None:
                piece = target.tensor[common[1]]
                num_left -= piece.numel()
                wanted[number].append((record, common[0], piece))
        if num_left:
            raise StoreError(
                f"{target.name.replace('/', ' ')} is divided, and {num_left} of the {target.tensor.numel()} elements "
                f"that belong here are in none of the {len(sources)} folders"
            )
    for source, chosen in zip(sources, wanted, strict=True):
        source.read(chosen)


def _common(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns what two boxes have in common, as slices of each; None where that is nothing."""
    ours, others = [], []
    for start, size, other_start, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        begin, end = max(start, other_start), min(start + size, other_start + other_size)
        if begin >= end:
            return None
        ours.append(slice(begin - start, end - start))
        others.append(slice(begin - other_start, end - other_start))
    return tuple(ours), tuple(others)
