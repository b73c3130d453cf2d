"""Proves that what a block saves comes back from another tier as it would have stayed.

A tensor's bits are known when it leaves. They are looked at again when the block's forward ends, until when the tensor
is held, and when backward has it back. No version counter sees what is written past autograd in between, by
`tensor.data` or through numpy: backward reads that in memory, and does not of what has been on another tier.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memwall.apply.blocks.digests import Digest, Place, difference, digest_of
from memwall.apply.blocks.executor import BlockCall, OffloadEngine
from memwall.apply.offload.entry import Saved
from memwall.errors import NotExactError
from memwall.torch_internals.saved import quiet

_log = logging.getLogger(__name__)


class Proving:
    """Watches what one call of a block sends away.

    Args:
        engine: where it goes.
        call: of the block that is to keep what it saves from now on, where something differs.
    """

    def __init__(self, engine: OffloadEngine, call: BlockCall) -> None:
        self._engine, self._call = engine, call
        self._left: list[_Left] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Returns the engine's hooks, with what leaves by them compared."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        left, self._left = self._left, []
        is_on_cuda = any(one.source is not None and one.source.is_cuda for one in left)
        with quiet():
            now = [digest_of(one.source) for one in left if one.source is not None]
        changed = {one.packed.entry for one, digest in zip(left, now, strict=True) if one.is_changed(digest)}
        # Of a storage that is saved twice the bytes leave once: what is written in between would be missing.
        changed.update(one.packed.entry for one in left if one.is_shared and not one.is_whole())
        for one in left:
            if one.packed.entry not in changed:
                one.source = None  # else that is what backward reads, as it would without a plan
        if is_on_cuda:
            # What was held until now has filled segments that no other step needs.
            torch.cuda.empty_cache()

    def _pack(self, tensor: Tensor) -> Any:
        packed = self._engine.pack(tensor)
        if not isinstance(packed, Saved):
            return _Plain(self._engine, packed)
        with quiet():
            left = _Left(self._engine, self._call, packed, tensor.detach(), digest_of(tensor))
        self._left.append(left)
        return left


class _Plain:
    """Holds what is not compared."""

    __slots__ = ("_engine", "_packed")

    def __init__(self, engine: OffloadEngine, packed: Any) -> None:
        self._engine, self._packed = engine, packed

    def unpack(self) -> Tensor:
        return self._engine.unpack(self._packed)


class _Left:
    """Holds what has left: its bits then, and where it lay."""

    __slots__ = ("_call", "_engine", "_place", "digest", "is_shared", "packed", "source")

    def __init__(self, engine: OffloadEngine, call: BlockCall, packed: Saved, source: Tensor, digest: Digest) -> None:
        self._engine, self._call, self.packed, self.digest = engine, call, packed, digest
        self.source: Tensor | None = source
        self.is_shared = packed.entry.num_handles > 1
        self._place = Place.of(source)

    def is_changed(self, now: Digest) -> bool:
        """Returns whether the source has other bits by now than when it left; then the block stays from now on."""
        if not difference([self.digest], [now]):
            return False
        self._lose(f"{self.packed.label} is written past autograd, by .data or through numpy")
        return True

    def is_whole(self) -> bool:
        """Returns whether what has left are the bytes of this tensor too; else the block stays from now on."""
        if self.packed.was_modified():
            return True  # autograd says so when it wants the tensor
        tensor = self._engine.reread(self.packed)
        with quiet():
            if not difference([self.digest], [digest_of(tensor)]):
                return True
        self._lose(f"the storage of {self.packed.label} is saved twice, and written in between past autograd")
        return False

    def _lose(self, reason: str) -> None:
        if not self._call.counts.stays:
            self._call.counts.stays = reason
            _log.warning("'%s' keeps what it saves and is not offloaded: %s", self._call.key[0], reason)

    def unpack(self) -> Tensor:
        if self.packed.was_modified():
            return self._engine.unpack(self.packed)  # which says so
        if self.source is not None:
            return self.source
        with quiet():
            source = self._place.tensor()
            if source is not None and self.is_changed(digest_of(source)):
                return source
        tensor = self._engine.unpack(self.packed)
        with quiet():
            back = digest_of(tensor)
        if difference([self.digest], [back]):
            raise NotExactError(
                action=f"offload of '{self._call.key[0]}'",
                found=f"{self.packed.label} came back different from what left, unnoticed by the tier",
            )
        return tensor


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor
