"""Commits steps to a journal: which tensor is where in which bucket, and whether what was written is what was there."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from memwall.apply.optimizer_state.kept_space import KeptSpace
from memwall.checkpoint.committed import Content
from memwall.checkpoint.training_state import (
    Part,
    TensorRecord,
    decode_objects,
    names_of_parameters,
    record_of,
    state_dict_names,
    state_kind,
)
from memwall.checkpoint.writer import CommitWriter, PackedBucket, bytes_of, packed
from memwall.errors import ApplyError
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.generation import Stored
from memwall.store.journal import Journal
from memwall.torch_internals.autograd import version_of

_log = logging.getLogger(__name__)

BUCKET_BYTES = 32 << 20


class _Layout(NamedTuple):
    key: tuple[Any, ...]
    records: tuple[TensorRecord, ...]
    groups: tuple[tuple[Any, tuple[tuple[int, int], ...]], ...]
    """Per bucket its kind, and (number of the part, offset) of each tensor in it."""


class OnDisk(NamedTuple):
    """Holds buckets, and the tensors in them."""

    stored: tuple[Stored, ...]
    records: tuple[TensorRecord, ...]


class Commits:
    """Sorts tensors into buckets, writes those that changed, and remembers where each was in the last commit.

    Args:
        journal: begun.

    Attributes:
        step: the last one that is committed.
        writer: writes one commit at a time.
    """

    def __init__(self, journal: Journal, *, step: int) -> None:
        self._journal, self.writer, self.step = journal, CommitWriter(journal), step
        self._is_overlapped = True
        """Whether a commit may be written while the next step runs."""
        self._is_first = True
        self._layout: _Layout | None = None
        self._stored: tuple[Stored, ...] = ()
        """Places of the buckets of the last commit; () where the layout is a new one since."""
        self._names: dict[str, str] | None = None
        self._to_check: list[tuple[PackedBucket, Stored]] = []
        """Buckets of the first commit, to be compared with memory just before the update."""

    def state_dict_names(self, model: nn.Module) -> dict[str, str]:
        """Returns the names of the model's own state dict, found once for each layout."""
        if self._names is None:
            self._names = state_dict_names(model)
        return self._names

    def begin(
        self,
        step: int,
        present: Sequence[Part],
        objects: Callable[[], bytes],
        plan: bytes | None,
        on_disk: Callable[[int], OnDisk],
    ) -> None:
        """Takes down a step, and begins to write it; nothing is being written.

        Args:
            present: tensors in memory.
            objects: encodes the rest; asked once the layout stands.
            plan: the plan file in effect.
            on_disk: finds what is on disk already, as buckets from the number given.
        """
        buckets = self._pack(present)
        there = on_disk(len(buckets))
        self._journal.data.hold([stored.slot for stored in there.stored])
        rest = objects()
        if self._is_first:
            decode_objects(rest)  # what cannot be read back must not be found out when it is needed
        assert self._layout is not None
        tensors = (*self._layout.records, *there.records)
        content = msgspec.msgpack.encode(
            Content(tensors=tensors, objects=rest, plan=plan, torch_version=str(torch.__version__))
        )
        if self._is_first:
            num_bytes = sum(bucket.num_bytes for bucket in buckets) + sum(stored.num_bytes for stored in there.stored)
            self._journal.data.reserve(2 * (num_bytes + round_up(2 * len(content))))
        versions = [(part.name, part.tensor, version_of(part.tensor)) for part in present if part.kind != "volatile"]

        def finish(stored: tuple[Stored, ...]) -> None:
            changed = next((name for name, tensor, version in versions if version_of(tensor) != version), None)
            if changed is not None:
                self._give_up(stored, changed)
                return
            self._journal.commit(step, (*stored, *there.stored), content)
            self._stored, self.step = stored, step

        self.writer.begin(buckets, finish)
        if self._is_first:
            self._is_first = False
            self.writer.wait()
            if self.step == step:
                self._to_check = list(zip(buckets, self._stored, strict=True))
        if not self._is_overlapped:
            self.writer.wait()

    def check_first(self) -> None:
        """Compares once what was written with what is there just before the update.

        A forward that writes to a parameter through `.data` leaves no other trace.
        """
        changed, self._to_check = self.writer.first_changed(self._to_check), []
        if changed is not None:
            self._write_at_once(changed)

    def _give_up(self, stored: Iterable[Stored], name: str) -> None:
        """Frees what was written while something changed: it is a mixture, and stays uncommitted."""
        for one in stored:
            if one not in self._stored:
                self._journal.data.free(one.slot)
        self._write_at_once(name)

    def _write_at_once(self, name: str) -> None:
        self._is_overlapped = False
        _log.warning(
            "%s changed between a forward and the optimizer's step; from now on each forward waits until its commit is "
            "written; change it after the optimizer's step to have commits written beside the next step",
            name,
        )

    def _pack(self, parts: Sequence[Part]) -> list[PackedBucket]:
        """Returns the buckets as they are now; what is volatile is copied."""
        layout = self._laid_out(parts)
        buckets = []
        for number, (kind, chosen) in enumerate(layout.groups):
            sources = tuple(bytes_of(parts[place].tensor) for place, _ in chosen)
            if kind == "volatile":
                sources = tuple(source.clone() for source in sources)
            end = chosen[-1][1] + sources[-1].numel()
            buckets.append(
                PackedBucket(
                    sources=sources,
                    offsets=tuple(offset for _, offset in chosen),
                    num_bytes=max(round_up(end), ALIGNMENT_BYTES),
                    before=self._stored[number] if kind == "frozen" and self._stored else None,
                    label=f"the bucket of {parts[chosen[0][0]].name.replace('/', ' ')}",
                )
            )
        return buckets

    def _laid_out(self, parts: Sequence[Part]) -> _Layout:
        """Returns buckets of one kind each: frozen tensors are not written with those that change."""
        key = tuple((p.name, p.kind, p.tensor.dtype, p.tensor.shape, p.tensor.stride(), p.tensor.device) for p in parts)
        if self._layout is not None and self._layout.key == key:
            return self._layout
        groups: list[tuple[Any, tuple[tuple[int, int], ...]]] = []
        places: dict[int, tuple[int, int]] = {}
        for kind in ("trained", "frozen", "volatile"):
            numbers = [number for number, part in enumerate(parts) if part.kind == kind]
            for bucket in packed([parts[number].tensor.nbytes for number in numbers], BUCKET_BYTES):
                chosen = tuple((numbers[place], offset) for place, offset in bucket)
                places |= {number: (len(groups), offset) for number, offset in chosen}
                groups.append((kind, chosen))
        records = tuple(
            record_of(part.name, part.tensor, *places[number], is_on_host=part.tensor.device.type == "cpu")
            for number, part in enumerate(parts)
        )
        self._layout, self._stored, self._names = _Layout(key, records, tuple(groups)), (), None
        return self._layout


def find_on_disk(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    space: KeptSpace,
    absent: Iterable[Part],
    *,
    first: int,
) -> OnDisk:
    """Returns what a commit is to name of the optimizers' state and of the model's parameters.

    Args:
        space: where it lies.
        absent: parameters that are on disk, wherever that is.
        first: the number of the first bucket.

    Raises:
        ApplyError: one of them lies elsewhere.
        StoreError: no room on disk, or a transfer failed.
    """
    stored: list[Stored] = []
    records: list[TensorRecord] = []
    names: dict[int, str] = {}
    for place, optimizer in enumerate(optimizers):
        own = names_of_parameters(model, optimizer, place)
        names = own | names
        holders = {id(state): own[id(p)] for p, state in optimizer.state.items() if id(p) in own}
        keeper = space.keeper_of(optimizer)
        for bucket in () if keeper is None else keeper.buckets:
            if bucket.slot is None:
                continue
            number = first + len(stored)
            records += [
                record_of(f"{state_kind(place)}/{key}/{holders[id(holder)]}", away, number, offset, is_on_host=True)
                for (holder, key), away, offset in bucket.pieces_away()
            ]
            stored.append(Stored(bucket.slot, bucket.num_bytes))
    for parameter, slot, num_bytes in [] if space.parameters is None else space.parameters.stored():
        number = first + len(stored)
        records.append(record_of(f"parameter/{names[id(parameter)]}", parameter, number, 0, is_on_host=True))
        stored.append(Stored(slot, num_bytes))
    known = {record.name for record in records}
    lost = next((part.name for part in absent if part.name not in known), None)
    if lost is not None:
        raise ApplyError(
            f"{lost.replace('/', ' ')} is neither in memory nor in {space.pool.scratch.path}: a session put it "
            "elsewhere before the checkpoint was opened; open the checkpoint first"
        )
    return OnDisk(tuple(stored), tuple(records))
