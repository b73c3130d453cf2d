"""Digests of tensors: whether two runs saved the same bits, known without keeping those of either.

On the CPU a digest is a checksum, at once. On a device it is a number that stays there until all of a run's are
compared: asking for each one would wait for the device each time.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from memwall.store.checksum import crc32
from memwall.store.room import with_room
from memwall.store.transfer import memory_at
from memwall.torch_internals.autograd import innermost_saved_tensor_hooks, version_of
from memwall.torch_internals.compiler import unseen
from memwall.torch_internals.dispatch import without_dispatch
from memwall.torch_internals.modules import own_buffers

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are worked on at a time, where that takes a copy: small tensors are divided into many parts, large ones
# into few of what is little beside them. On a device parts stay small, with 8 bytes for each of some copies of one:
# no forecast has them, and torch takes what is below 1 MiB from segments of 2 MiB.
_LEAST_PART, _MOST_PART, _NUM_PARTS = 1 << 16, 1 << 19, 64
# A second run has what it computes with beside all that the first one saved: what an operation reads, its result, and
# what it needs for itself. So has an operation of the first run beside what was saved before it.
_RESULTS_AT_ONCE = 3
# Any odd number with bits all over: 2^64 by the golden ratio.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
# What CUDA's attention saves for its dropout: seed and offset, or both in one. Without dropout they are never written
# (torch 2.13, aten/src/ATen/native/transformers/cuda/attention.cu), and another mask shows in the attention's result.
_RANDOM_SHAPES, _RANDOM_DTYPES = (torch.Size(()), torch.Size((2,))), (torch.int64, torch.uint64)


class Digest(NamedTuple):
    """Stands for the bits of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    """Dimensions from the one with the longest stride on."""
    value: int | Tensor
    """0 where there are no bits to be read: of a subclass, a sparse tensor, one on the meta device."""


class Place(NamedTuple):
    """Says where a tensor lies, and keeps nothing alive."""

    storage: "weakref.ref[torch.UntypedStorage]"
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Returns the place of a strided tensor."""
        storage = weakref.ref(tensor.untyped_storage())
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def tensor(self) -> Tensor | None:
        """Returns what lies there now; None where the memory has been given back."""
        storage = self.storage()
        if storage is None:
            return None
        with without_dispatch(), torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)


def digest_of(tensor: Tensor) -> Digest:
    """Returns the digest of a tensor. Under a mode that watches operations nothing is to be seen of it."""
    shape = tuple(tensor.shape)
    is_readable = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not is_readable or tensor.is_quantized or not tensor.numel():
        return Digest(shape, tensor.dtype, (), 0)
    with without_dispatch(), torch.no_grad():
        words = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
        words = words.view(_WORDS[words.element_size()])
        strides = words.stride()
        order = tuple(sorted(_spread(words), key=lambda dim: -strides[dim]))
        for dim in sorted(set(range(words.dim())) - set(order), reverse=True):
            words = words.select(dim, 0)
        ranks = sorted(order)
        words = words.permute([ranks.index(dim) for dim in order])
        value = _checksum(words) if words.device.type == "cpu" else with_room(lambda: weighted_sum(words))
        return Digest(shape, tensor.dtype, order, value)


def difference(first: Sequence[Digest], second: Sequence[Digest]) -> str:
    """Returns what differs between the tensors of two runs; "" if nothing does. Waits for the device once a run."""
    if len(first) != len(second):
        return f"it keeps {len(first)} tensors the first time and {len(second)} the second"
    values = zip(_values(first), _values(second), strict=True)
    for number, (a, b, (one, other)) in enumerate(zip(first, second, values, strict=True)):
        if a[:3] != b[:3]:
            return f"number {number} of the tensors that it keeps is {_name(a)} the first time and {_name(b)} then"
        if one != other:
            return f"number {number} of the {len(first)} tensors that it keeps, {_name(a)}, has other values"
    return ""


def written(places: Sequence[tuple[Digest, Place]]) -> str:
    """Returns what of the tensors that still lie somewhere has other bits by now; "" if nothing has.

    No version counter sees what is written past autograd, by `tensor.data` or through numpy.
    """
    there = [(digest, tensor) for digest, place in places if (tensor := place.tensor()) is not None]
    return difference([digest for digest, _ in there], [digest_of(tensor) for _, tensor in there])


def weighted_sum(words: Tensor) -> Tensor:
    """Returns the sum of integers, each multiplied by a number for its place; it stays where they are."""
    parts = pieces(words, is_copied=True, most=_LEAST_PART)
    weights = torch.arange(max(part.numel() for part in parts), device=words.device).mul_(2).add_(1).mul_(_FACTOR)
    weights ^= weights >> 29
    sums = torch.empty(len(parts), dtype=torch.int64, device=words.device)
    for number, part in enumerate(parts):
        torch.sum(_mixed(part.reshape(-1)) * weights[: part.numel()], 0, out=sums[number])
    return sums[0] if len(parts) == 1 else weighted_sum(sums)


def _mixed(words: Tensor) -> Tensor:
    """Returns other integers, one for each, whose upper bits are in the lower ones too: a product loses the upper."""
    return words if words.element_size() < 8 else words ^ ((words >> 32) & 0xFFFFFFFF)


def _checksum(words: Tensor) -> int:
    value = 0
    for part in pieces(words, is_copied=not words.is_contiguous()):
        packed = part.contiguous()
        value = hash((value, crc32(memory_at(packed.data_ptr(), packed.nbytes))))
    return value


def _spread(words: Tensor) -> list[int]:
    """Returns the dimensions along which there is more than one element in memory."""
    return [dim for dim, (size, step) in enumerate(zip(words.shape, words.stride(), strict=True)) if size > 1 and step]


def pieces(words: Tensor, *, is_copied: bool, most: int = 0) -> Sequence[Tensor]:
    """Returns views of a tensor that together are all of it, small ones where something copies each (`is_copied`)."""
    if not is_copied or not words.dim():
        return (words,)
    row = max(1, words.numel() // words.shape[0])
    most = most or min(max(_LEAST_PART, words.numel() // _NUM_PARTS), _MOST_PART)
    if row > 2 * most and words.dim() > 1:
        return [part for slab in words.unbind(0) for part in pieces(slab, is_copied=True, most=most)]
    parts: Sequence[Tensor] = words.split(max(1, most // row))
    return parts


def _values(digests: Sequence[Digest]) -> list[int]:
    values = [digest.value for digest in digests]
    there = [value for value in values if isinstance(value, Tensor)]
    read: dict[int, int] = {}
    for device in {value.device for value in there}:
        here = [value for value in there if value.device == device]
        with without_dispatch():  # a checkpoint that keeps results takes every operation for the block's
            read |= dict(zip(map(id, here), torch.stack(here).tolist(), strict=True))
    return [read[id(value)] if isinstance(value, Tensor) else value for value in values]


def _name(digest: Digest) -> str:
    return f"{list(digest.shape)} {str(digest.dtype).removeprefix('torch.')}"


class Digesting:
    """Takes digests of what is saved within; then the hooks get it that are innermost when this begins.

    Args:
        norms: layers whose running statistics do not count: they are saved beside what backward reads.
        keeps: whether to keep the tensors too; backward then reads these, until `release`. A plan foresees a block
            without them: while there is room.
        room_bytes: returns what tensors may still take; None where nothing limits them.
        skips_workspaces: whether bytes in a row are compared by their size alone: recurrent layers save the workspace
            of their kernel, of which some bytes are never written.
        repeats: a run that keeps its tensors, which this one repeats. From a tensor with the same bits on, the two runs
            share the later one, so that a proof needs hardly more memory than the saved tensors.
    """

    def __init__(
        self,
        norms: Sequence[nn.Module] = (),
        *,
        keeps: bool = False,
        room_bytes: Callable[[], int | None] = lambda: None,
        repeats: "Digesting | None" = None,
        skips_workspaces: bool = False,
    ) -> None:
        self.taken: list[Digest] = []
        self._norms, self._keeps, self._repeated = norms, keeps, repeats
        self._is_first, self._room_bytes = keeps, room_bytes
        self._skips_workspaces = skips_workspaces
        self.lacked_bytes = 0
        """Counts what was lacking, at least, to keep the tensors and repeat the run; 0 where there was room."""
        self._kept: list[_Kept] = []
        self.places: list[tuple[Digest, Place]] = []
        """Says where tensors lie that a run to be repeated has saved, as long as they do."""
        self._largest_bytes = 0
        """The size of the largest tensor of these."""
        self._passed_by: frozenset[int] = frozenset()

    def __enter__(self) -> Self:
        buffers = (buffer for norm in self._norms for buffer in own_buffers(norm).values() if buffer is not None)
        self._passed_by = frozenset(buffer.data_ptr() for buffer in buffers)
        outer: tuple[Any, Any] = innermost_saved_tensor_hooks() or (_same, _same)
        self._pack_outer, self._unpack_outer = outer
        self._hooks = torch.autograd.graph.saved_tensors_hooks(unseen(self._pack), unseen(self._unpack))
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        hooks = self.__dict__.pop("_hooks")  # they hold this: without a cycle it goes with the graph
        hooks.__exit__()

    def need(self, num_bytes: int) -> None:
        """Lets go of the tensors, and keeps none from now on, where there is no room for so many bytes more."""
        room_bytes = self._room_bytes()
        if room_bytes is not None and room_bytes < num_bytes:
            self.lacked_bytes = max(self.lacked_bytes, num_bytes - room_bytes)
            self.release()
            self._keeps = False

    def need_second_run(self, kept_bytes: int = 0) -> None:
        """Does so for what a second run takes, or an operation of this one.

        Args:
            kept_bytes: results of this run that a selective checkpoint holds: the second one makes them beside these.
        """
        self.need(_RESULTS_AT_ONCE * self._largest_bytes + kept_bytes)

    def release(self) -> None:
        """Lets go of the tensors: from now on backward has what the outer hooks give."""
        for kept in self._kept:
            kept.tensor = None
        self._kept = []

    def share(self, number: int, digest: Digest, tensor: Tensor) -> None:
        """Keeps this tensor instead of the one of that number, if their bits are the same. Waits for a device."""
        if number < len(self._kept) and digest.order and not difference(self.taken[number : number + 1], [digest]):
            self._kept[number].put(tensor.detach())

    def _pack(self, tensor: Tensor) -> Any:
        is_passed_by = self._passed_by and tensor.data_ptr() in self._passed_by
        is_passed_by = is_passed_by or (self._skips_workspaces and tensor.dtype is torch.uint8 and tensor.dim() == 1)
        is_passed_by = is_passed_by or (tensor.shape in _RANDOM_SHAPES and tensor.dtype in _RANDOM_DTYPES)
        self.taken.append(Digest(tuple(tensor.shape), tensor.dtype, (), 0) if is_passed_by else digest_of(tensor))
        if self._repeated is not None and type(tensor) is Tensor:
            self._repeated.share(len(self.taken) - 1, self.taken[-1], tensor)
        packed = self._pack_outer(tensor)
        if not self._is_first:
            return packed
        self._largest_bytes = max(self._largest_bytes, tensor.nbytes)
        if self.taken[-1].order:
            self.places.append((self.taken[-1], Place.of(tensor)))
        self.need_second_run()
        if not self._keeps:
            return packed
        self._kept.append(_Kept(packed, tensor))
        return self._kept[-1]

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Kept):
            return self._unpack_outer(packed)
        return self._unpack_outer(packed.outer) if packed.tensor is None else packed.unchanged()


class _Kept:
    """Holds a saved tensor, and what the outer hooks made of it."""

    __slots__ = ("outer", "tensor", "version")

    def __init__(self, outer: Any, tensor: Tensor) -> None:
        self.outer = outer
        self.put(tensor)

    def put(self, tensor: Tensor) -> None:
        """Makes this the tensor that backward reads."""
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)

    def unchanged(self) -> Tensor:
        """Returns the tensor; torch looks for writes into it itself only where there are no hooks."""
        assert self.tensor is not None
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{_name(digest_of(self.tensor))} is at version {version_of(self.tensor)}; expected {self.version}"
            )
        return self.tensor


def _same(value: Any) -> Any:
    return value
