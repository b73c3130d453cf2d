"""A recorded step of one process as one of several ranks runs it: what is divided, and what is gathered meanwhile."""

from collections.abc import Iterable
from fractions import Fraction

import msgspec

from memwall.predict.sharding.units import ShardUnit
from memwall.trace.records import Category, Step, Storage, Trace

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_HALF_BYTES = 2


def is_added(storage: Storage) -> bool:
    """Tells whether a storage stands for what a way to divide a model makes, and was not recorded."""
    return storage.module < 0 and storage.phase == "other"


class RankStep:
    """Changes a step bit by bit; storages keep their numbers, and new ones come after them.

    Args:
        step: one of the trace's.
    """

    def __init__(self, trace: Trace, step: Step, units: tuple[ShardUnit, ...]) -> None:
        self.units = units
        self._step, self._names = step, trace.names
        self._ops = list(step.ops)
        self._storages = list(step.storages)
        self.device = next((s.device for s in step.storages if s.category == "parameter"), trace.device)
        self._casts = self._cast_copies() if trace.autocast != "none" else {}

    @property
    def end(self) -> int:
        """Returns the number of operations: the end of what stands between steps."""
        return len(self._ops)

    def nbytes(self, indices: Iterable[int]) -> int:
        """Returns the bytes of storages as they were recorded."""
        return sum(self._step.storages[index].nbytes for index in indices)

    def num_elements(self, indices: Iterable[int]) -> int:
        """Returns the elements of storages; a dtype that was not seen counts as float32."""
        return sum(
            self._step.storages[index].nbytes // ITEMSIZES.get(self._step.storages[index].dtype, 4) for index in indices
        )

    def birth(self, index: int) -> int:
        """Returns the operation that makes a storage in the recorded step."""
        return self._step.storages[index].birth

    @property
    def parameters(self) -> tuple[int, ...]:
        """Returns the storages of all parameters."""
        return tuple(index for unit in self.units for index in unit.parameters)

    @property
    def is_lower(self) -> bool:
        """Tells whether parameters are used in half precision: recorded so, or cast under autocast."""
        used = {self._step.storages[index].dtype for index in self.parameters}
        return bool(self._casts) or bool(used & {"bfloat16", "float16"})

    def without_casts(self) -> None:
        """Takes away the copies that autocast makes of parameters: what is gathered is in that precision already."""
        for index in {copy for copies in self._casts.values() for copy in copies}:
            storage = self._storages[index]
            self._storages[index] = msgspec.structs.replace(storage, nbytes=0)
            if storage.birth >= 0:
                self._ops[storage.birth] = msgspec.structs.replace(self._ops[storage.birth], seconds=0.0)

    def in_half(self, category: Category) -> None:
        """Makes what is recorded in float32 of a category two bytes for each element."""
        for index, storage in enumerate(self._storages):
            if storage.category == category and storage.dtype == "float32":
                self._storages[index] = msgspec.structs.replace(
                    storage, nbytes=storage.nbytes // 4 * _HALF_BYTES, dtype="bfloat16"
                )

    def widen_state(self) -> None:
        """Makes optimizer state that is recorded in half precision float32, as that of master weights."""
        for index, storage in enumerate(self._storages):
            if storage.category == "optimizer_state" and ITEMSIZES.get(storage.dtype) == _HALF_BYTES:
                self._storages[index] = msgspec.structs.replace(storage, nbytes=2 * storage.nbytes, dtype="float32")

    def divide(self, category: Category, num: int | Fraction) -> None:
        """Leaves each rank its part of what stands of a category, rounded up; of gradients, what is there before.

        Args:
            num: the ranks; of unequal parts, so many as there would be if all were as large as the largest.
        """
        for index, storage in enumerate(self._storages):
            is_whole = storage.category == "gradient" and storage.birth >= 0
            if storage.category == category and storage.device == self.device and not is_whole:
                self._storages[index] = msgspec.structs.replace(storage, nbytes=-(-storage.nbytes // num))

    def remove(self, category: Category) -> int:
        """Takes the storages of a category off the device, and returns their bytes."""
        removed_bytes = 0
        for index, storage in enumerate(self._storages):
            if storage.category == category and storage.device == self.device:
                removed_bytes += storage.nbytes
                self._storages[index] = msgspec.structs.replace(storage, nbytes=0)
        return removed_bytes

    def divide_optimizer(self, num: int | Fraction, *, is_elsewhere: bool = False) -> None:
        """Leaves each rank its part of the optimizer's operations, or none where it steps on the CPU."""
        for number, op in enumerate(self._ops):
            if op.phase == "optimizer":
                self._ops[number] = msgspec.structs.replace(op, seconds=0.0 if is_elsewhere else op.seconds / num)
        for index, storage in enumerate(self._storages):
            is_its_own = storage.birth >= 0 and storage.phase == "optimizer" and storage.category == "temporary"
            if is_its_own and storage.device == self.device:
                nbytes = 0 if is_elsewhere else -(-storage.nbytes // num)
                self._storages[index] = msgspec.structs.replace(storage, nbytes=nbytes)

    def end_gradients(self, unit: ShardUnit, at: int, *, is_half: bool = False) -> None:
        """Makes the whole gradients of a unit die there: what outlives its reduction is the rank's part."""
        for index in unit.gradients:
            storage = self._storages[index]
            nbytes = storage.nbytes // 4 * _HALF_BYTES if is_half and storage.dtype == "float32" else storage.nbytes
            self._storages[index] = msgspec.structs.replace(
                storage, nbytes=nbytes, category="temporary", dropped=at, death=max(at, storage.birth + 1)
            )

    def add(self, nbytes: int, birth: int, death: int, category: Category = "parameter", dtype: str = "") -> None:
        """Adds a storage; gathered parameters are none of a block's making, so that no treatment moves them."""
        if nbytes <= 0 or death <= birth:
            return
        self._storages.append(
            Storage(
                nbytes=nbytes,
                device=self.device,
                category=category,
                birth=birth,
                dropped=death,
                death=death,
                module=-1,
                phase="other",
                batched=False,
                dtype=dtype,
            )
        )

    def seconds(self, start: int, end: int) -> float:
        """Returns the seconds of operations [start, end)."""
        return sum(op.seconds for op in self._ops[start:end])

    @property
    def gradients_made(self) -> tuple[int, int]:
        """Returns when the first gradient is there, and the end of the backward that makes the last."""
        births = [self._step.storages[index].birth for unit in self.units for index in unit.gradients]
        return min(births, default=self.end), max(births, default=self.end - 1) + 1

    def gradients_end(self, unit: ShardUnit) -> int:
        """Returns when the gradients of a unit die in the recorded step."""
        return max((self._step.storages[index].death for index in unit.gradients), default=self.end)

    def done(self) -> Step:
        """Returns the changed step."""
        return msgspec.structs.replace(self._step, ops=tuple(self._ops), storages=tuple(self._storages))

    def _cast_copies(self) -> dict[int, list[int]]:
        """Returns the half precision copies that operations make of parameters alone, by parameter."""
        found: dict[int, list[int]] = {}
        for number, op in enumerate(self._step.ops):
            if op.phase not in ("forward", "loss") or len(op.inputs) != 1:
                continue
            source = self._step.storages[op.inputs[0]]
            if source.category != "parameter" or "_to_copy" not in self._names[op.name]:
                continue
            for index in op.outputs:
                copy = self._step.storages[index]
                if copy.birth == number and copy.dtype in ("bfloat16", "float16"):
                    found.setdefault(op.inputs[0], []).append(index)
        return found
