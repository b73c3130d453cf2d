"""Optimizer state that leaves memory while a step is being recorded, so that the trace still shows the plain step.

A recorder follows storages: one that dies has been freed. So what goes to disk stays alive as a tensor whose storage
has given up its memory, and takes its memory back when it returns. The moves themselves are no part of the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from memwall.store.buckets import Bucket, Entry
from memwall.torch_internals.dispatch import without_dispatch_modes


class _Emptied(NamedTuple):
    """Holds a tensor without memory, and the one on the meta device that stands in its place."""

    entry: Entry
    tensor: Tensor
    away: Tensor
    num_bytes: int


def emptiable(entries: Sequence[Entry]) -> list[Entry]:
    """Returns those whose tensor has all of a storage that can give up its memory."""
    found = []
    for holder, key in entries:
        tensor: Tensor = holder[key]
        storage = tensor.untyped_storage()
        if storage.resizable() and storage.nbytes() == tensor.numel() * tensor.element_size():
            found.append((holder, key))
    return found


class RecordedState:
    """Keeps tensors of buckets that are away, as the recorder knows them."""

    def __init__(self) -> None:
        self._emptied: dict[Bucket[Any], list[_Emptied]] = {}

    def put_away(self, bucket: Bucket[Any], entries: Sequence[Entry]) -> None:
        """Writes tensors, and takes their memory once they are on disk.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        with without_dispatch_modes():
            entries = emptiable(entries)
            tensors = [holder[key] for holder, key in entries]
            bucket.put_away(entries, None)
            bucket.wait_for_write()
            self.empty(bucket, tensors)

    def empty(self, bucket: Bucket[Any], tensors: Sequence[Tensor]) -> None:
        """Takes the memory of tensors that a bucket has written, given in its order."""
        self._emptied[bucket] = [
            _Emptied(entry, tensor, away, tensor.untyped_storage().nbytes())
            for (entry, away, _), tensor in zip(bucket.pieces_away(), tensors, strict=True)
        ]
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def bring(self, bucket: Bucket[Any]) -> None:
        """Gives the tensors of a bucket their memory and their places back.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        with without_dispatch_modes():
            copies = bucket.copies()
            for (holder, key), tensor, away, num_bytes in self._emptied.pop(bucket, []):
                tensor.untyped_storage().resize_(num_bytes)
                tensor.copy_(copies[id(away)])
                if holder.get(key) is away:
                    holder[key] = tensor

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Has every tensor stand where it stands in a plain run for a while, to be looked at, not read.

        On a device it stands there without its memory, for which there may be no room.
        """
        every = [emptied for some in self._emptied.values() for emptied in some]
        present = [one for one in every if one.entry[0].get(one.entry[1]) is one.away]
        for (holder, key), tensor, _, num_bytes in present:
            if not tensor.is_cuda:
                tensor.untyped_storage().resize_(num_bytes)  # memory that nobody touches is not resident
            holder[key] = tensor
        try:
            yield
        finally:
            for (holder, key), tensor, away, _ in present:
                tensor.untyped_storage().resize_(0)
                holder[key] = away
