"""Which tensor of a training run is where in which bucket, and which bytes that is: stays from commit to commit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from memwall.checkpoint.training_state import Part, TensorRecord, record_of, state_dict_names
from memwall.checkpoint.writer import Packed, bytes_of, packed
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.journal import Stored

__all__ = ["CommitLayout"]

BUCKET_BYTES = 32 << 20


class _Layout(NamedTuple):
    key: tuple[Any, ...]
    records: tuple[TensorRecord, ...]
    groups: tuple[tuple[Any, tuple[tuple[int, int], ...]], ...]
    """Per bucket its kind, and (number of the part, offset) of each tensor in it."""


class CommitLayout:
    """Sorts tensors into buckets, and remembers where each bucket was in the last commit.

    Attributes:
        records: where each tensor is, of the last call of `pack`.
        stored: where the buckets of the last commit are; () where the layout is a new one since.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self.records: tuple[TensorRecord, ...] = ()
        self.stored: tuple[Stored, ...] = ()
        self._names: dict[str, str] | None = None

    def state_dict_names(self, model: nn.Module) -> dict[str, str]:
        """Of the model's own state dict, found once for each layout."""
        if self._names is None:
            self._names = state_dict_names(model)
        return self._names

    def pack(self, parts: Sequence[Part]) -> list[Packed]:
        """The buckets as they are now; what is volatile is copied."""
        layout = self._laid_out(parts)
        buckets = []
        for number, (kind, chosen) in enumerate(layout.groups):
            sources = tuple(bytes_of(parts[place].tensor) for place, _ in chosen)
            if kind == "volatile":
                sources = tuple(source.clone() for source in sources)
            end = chosen[-1][1] + sources[-1].numel()
            buckets.append(
                Packed(
                    sources=sources,
                    offsets=tuple(offset for _, offset in chosen),
                    num_bytes=max(round_up(end), ALIGNMENT_BYTES),
                    before=self.stored[number] if kind == "frozen" and self.stored else None,
                    label=f"the bucket of {parts[chosen[0][0]].name.replace('/', ' ')}",
                )
            )
        return buckets

    def _laid_out(self, parts: Sequence[Part]) -> _Layout:
        """Buckets of one kind each: frozen tensors are not written with those that change."""
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
        self.records = tuple(
            record_of(part.name, part.tensor, *places[number], is_on_host=part.tensor.device.type == "cpu")
            for number, part in enumerate(parts)
        )
        self._layout, self.stored, self._names = _Layout(key, self.records, tuple(groups)), (), None
        return self._layout
