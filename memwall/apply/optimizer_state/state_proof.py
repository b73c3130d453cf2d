"""Proves that an optimizer's state comes back as it left: its digests are taken before it leaves, and once it is back.

The disk's own checksums see bytes that it loses. This sees the rest of the way: copies into and out of a bucket, and
that each tensor is back under its own key.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memwall.apply.blocks.digests import Digest, difference, digest_of
from memwall.errors import NotExactError
from memwall.store.buckets import Entry


class StateProof:
    """Holds digests of what has left while this was on, until it is back once."""

    def __init__(self) -> None:
        self.is_on = False
        self._left: dict[int, list[tuple[Entry, Digest]]] = {}

    def leaving(self, entries: list[Entry]) -> list[Entry]:
        """Takes the digests of tensors that are about to leave; returns where they are."""
        if self.is_on:
            for holder, key in entries:
                self._left.setdefault(id(holder), []).append(((holder, key), digest_of(holder[key])))
        return entries

    def before_step(self) -> None:
        """Forgets tensors in whose place somebody has put others since."""
        self._left = {
            number: [one for one in left if one[0][0][one[0][1]].is_meta] for number, left in self._left.items()
        }

    def returned(self, parameters: Sequence[Tensor], state: dict[Tensor, Any]) -> None:
        """Compares what is back of the state of some parameters, before a step uses it.

        Raises:
            NotExactError: it is not what left.
        """
        for parameter in parameters if self._left else ():
            for (holder, key), digest in self._left.pop(id(state.get(parameter)), ()):
                if holder[key].is_meta or difference([digest], [digest_of(holder[key])]):
                    raise NotExactError(
                        action="moving optimizer state",
                        found=f"'{key}' of a parameter {list(parameter.shape)} came back different from what left",
                    )

    def forget(self) -> None:
        """Forgets what has left: other state takes its place."""
        self._left = {}
