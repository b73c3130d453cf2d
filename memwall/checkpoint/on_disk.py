"""What of a run is on disk already when a step is committed: a commit names where it is, and writes nothing of it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from memwall.apply.optimizer_state.kept_space import KeptSpace
from memwall.checkpoint.training_state import Part, TensorRecord, names_of_parameters, record_of
from memwall.errors import ApplyError
from memwall.store.journal import Stored

__all__ = ["OnDisk", "find_on_disk"]


class OnDisk(NamedTuple):
    """Buckets, and the tensors in them."""

    stored: tuple[Stored, ...]
    records: tuple[TensorRecord, ...]


def find_on_disk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    space: KeptSpace,
    absent: Iterable[Part],
    *,
    first: int,
) -> OnDisk:
    """What a commit is to name of the optimizer's state and of the model's parameters.

    Args:
        space: where it lies.
        absent: parameters that are on disk, wherever that is.
        first: the number of the first bucket.

    Raises:
        ApplyError: one of them lies elsewhere.
        StoreError: no room on disk, or a transfer failed.
    """
    names = names_of_parameters(model, optimizer)
    holders = {id(state): names[id(p)] for p, state in optimizer.state.items() if id(p) in names}
    stored: list[Stored] = []
    records: list[TensorRecord] = []
    keeper = space.keeper_of(optimizer)
    for bucket in () if keeper is None else keeper.buckets:
        if bucket.slot is None:
            continue
        number = first + len(stored)
        records += [
            record_of(f"state/{key}/{holders[id(holder)]}", away, number, offset, is_on_host=True)
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
