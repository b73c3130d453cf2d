"""One call of a block under a treatment: what runs again in backward, and what moves."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from memwall.predict.packed_bytes import PACKED_ITEMSIZES, num_packed_bytes
from memwall.trace.records import ModuleCall, Step

# Selective checkpointing does not ask its policy about these (torch.utils.checkpoint.SAC_IGNORED_OPS, torch 2.13).
UNCOUNTED_OPS = frozenset({"aten.detach.default", "prim.device.default"})

_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})


class Treatment(Struct, frozen=True, kw_only=True):
    """Decides how every call of one block treats what autograd saves in it."""

    recompute: bool = False
    kept_ops: tuple[int, ...] = ()
    """Operations, with recompute, whose results are kept, numbered within the call without `UNCOUNTED_OPS`."""
    offload: bool = False
    """Saved tensors (with recompute: the block's inputs) move to the next tier."""
    is_packed: bool = False
    """Whether, with offload and without recompute, floating-point numbers leave in a byte each."""
    min_bytes: int = 1 << 20
    """Tensors below this stay where they are."""
    window_bytes: int = 0
    """Memory of a device for bytes on their way, which hold their sources; 0: it is counted elsewhere."""

    def but(self, **changes: Any) -> "Treatment":
        """Returns this treatment with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class BlockCalls(Struct, frozen=True, kw_only=True):
    """Describes a block, its calls in forward order, and per call the numbers of the tensors saved inside it."""

    path: str
    module: int
    calls: tuple[ModuleCall, ...]
    saved: tuple[tuple[int, ...], ...]

    @property
    def first_trained(self) -> int:
        """Returns the number of the first call that has a backward: another one says not what is written before it."""
        return next((number for number, call in enumerate(self.calls) if call.backward_start >= 0), 0)


def paths_in_order(blocks: Iterable[BlockCalls]) -> tuple[str, ...]:
    """Returns the path of each call that has a backward, in forward order: of a block that is called twice, twice."""
    calls = ((call.start, block.path) for block in blocks for call in block.calls if call.backward_start >= 0)
    return tuple(path for _, path in sorted(calls))


class Moved(NamedTuple):
    """Says what of a storage leaves the device and comes back."""

    nbytes: int
    """Bytes of the device's memory."""
    num_packed: int = 0
    """Elements that leave packed; 0 where bytes leave as they are."""

    @property
    def link_bytes(self) -> int:
        """Returns the bytes on their way, and on the tier."""
        return num_packed_bytes(self.num_packed) if self.num_packed else self.nbytes


class CallRules:
    """Answers about single calls of a step's blocks."""

    def __init__(self, step: Step, names: Sequence[str]) -> None:
        self.step = step
        self.names = tuple(names)
        self._is_counted = [name not in UNCOUNTED_OPS for name in names]
        self._counted: dict[tuple[int, int], list[int]] = {}
        self._writers: dict[int, list[int]] = {}
        for number, op in enumerate(step.ops):
            for written in op.writes:
                self._writers.setdefault(written, []).append(number)

    def given_back_until(self, number: int) -> int:
        """Returns the operation before which what backward was given for a saved tensor dies, if nobody else holds it.

        Autograd holds saved tensors until it has checked the gradients of their operation, and sums those of a bias
        that was added to many rows before that; what it was given in their place goes with the operation itself.
        """
        end, begin = self.step.saved[number].released, self.step.saved[number].unpacked
        ops = self.step.ops
        while end - 2 > begin and self.names[ops[end - 1].name] in _RESHAPES and self._is_sum(end - 2):
            end -= 2
        return end

    def _is_sum(self, op: int) -> bool:
        return self.names[self.step.ops[op].name] == "aten.sum.dim_IntList"

    def is_written(self, storage: int, start: int, end: int) -> bool:
        """Tells whether one of the operations [start, end) modifies a storage in place."""
        return any(start <= op < end for op in self._writers.get(storage, ()))

    def recomputed_at(self, call: ModuleCall, saved: Sequence[int]) -> int:
        """Returns the operation of backward before which a call is recomputed: its first that asks for its tensors."""
        asked = min((self.step.saved[s].unpacked for s in saved), default=call.backward_start)
        return min(max(asked, call.backward_start), call.backward_end - 1)

    def counted_ops(self, call: ModuleCall) -> list[int]:
        """Returns the operations of a call in the numbering that selective checkpointing uses."""
        key = call.start, call.end
        if key not in self._counted:
            self._counted[key] = [op for op in range(*key) if self._is_counted[self.step.ops[op].name]]
        return self._counted[key]

    def recomputed_ops(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> list[int]:
        """Returns the operations of a call that run again: up to the last one backward needs, without the kept ones."""
        needed = min(max((self.step.saved[s].packed for s in saved), default=call.start), call.end)
        counted = self.counted_ops(call)
        kept = {counted[i] for i in treatment.kept_ops if i < len(counted)}
        return [op for op in range(call.start, needed) if op not in kept]

    def repeated_ops(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> list[tuple[int, list[int]]]:
        """Returns the operations that run again in backward for one call, with the operation before which they do."""
        if treatment.recompute:
            return [(self.recomputed_at(call, saved), self.recomputed_ops(call, saved, treatment))]
        return []

    def movable(self, number: int, treatment: Treatment) -> bool:
        """Tells whether a saved tensor may leave the device: an activation or input, and large enough."""
        save = self.step.saved[number]
        return save.nbytes >= treatment.min_bytes and self.step.storages[save.storage].category in (
            "activation",
            "input",
        )

    def moved(self, call: ModuleCall, saved: Sequence[int], treatment: Treatment) -> dict[int, Moved]:
        """Returns by storage what leaves the device in a call under a treatment with offload."""
        if not treatment.recompute:
            return self._moved_of(saved, treatment)
        storages = {index: self.step.storages[index] for index in call.inputs}
        return {
            index: Moved(storage.nbytes)
            for index, storage in storages.items()
            if storage.birth >= 0
            and storage.nbytes >= treatment.min_bytes
            and storage.category in ("activation", "temporary", "input")
        }

    def _moved_of(self, saved: Sequence[int], treatment: Treatment) -> dict[int, Moved]:
        """Returns by storage what moves: all of it when its saved views cover a good part, as the executor does.

        The first of them decides whether it is packed.
        """
        views: dict[int, int] = {}
        packed: set[int] = set()
        for number in saved:
            if self.movable(number, treatment):
                save = self.step.saved[number]
                if save.storage not in views and save.nbytes == self.step.storages[save.storage].nbytes:
                    packed.add(save.storage)
                views[save.storage] = views.get(save.storage, 0) + save.nbytes
        found = {}
        for index, size in views.items():
            whole = self.step.storages[index].nbytes
            nbytes = whole if 4 * size >= whole else size
            found[index] = self._moved(index, nbytes, treatment) if index in packed else Moved(nbytes)
        return found

    def _moved(self, index: int, nbytes: int, treatment: Treatment) -> Moved:
        itemsize = PACKED_ITEMSIZES.get(self.step.storages[index].dtype, 0) if treatment.is_packed else 0
        return Moved(nbytes, nbytes // itemsize if itemsize else 0)

    def is_leaf_like(self, block: BlockCalls) -> bool:
        """Tells whether recomputing a block frees nothing: all it saves is what it was called with."""
        for call, saved in zip(block.calls, block.saved, strict=True):
            if any(call.start <= self.step.storages[self.step.saved[n].storage].birth < call.end for n in saved):
                return False
        return True
