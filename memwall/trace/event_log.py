"""The growing log of a step: storages, operations, saved tensors and module calls, before they become records."""

import weakref
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.storages import identity_of
from memwall.trace.records import Category, Phase

__all__ = ["EventLog"]


class EventLog:
    """Columns of what happened, in order. Appending is all that is done while the step runs, to keep it cheap."""

    def __init__(self, *, is_parked: bool) -> None:
        self.is_parked = is_parked
        self.micro_batch = 0
        self.input_shape: tuple[int, ...] = ()
        self.input_dtype = ""
        self.op_name: list[str] = []
        self.op_phase: list[Phase] = []
        self.op_call: list[int] = []
        self.op_line: list[int] = []
        self.op_sequence: list[int] = []
        self.op_seconds: list[float] = []
        self.op_flops: list[int] = []
        self.op_inputs: list[tuple[int, ...]] = []
        self.op_outputs: list[tuple[int, ...]] = []
        self.op_writes: list[tuple[int, ...]] = []
        self.op_workspace: dict[int, int] = {}
        self.storage_bytes: list[int] = []
        self.storage_device: list[str] = []
        self.storage_category: list[Category | None] = []
        self.storage_birth: list[int] = []
        self.storage_died: list[int] = []
        self.storage_shape: list[tuple[int, ...]] = []
        self.storage_line: list[int] = []
        self.storage_dtype: list[str] = []
        self.saved_storage: list[int] = []
        self.saved_bytes: list[int] = []
        self.saved_call: list[int] = []
        self.saved_moved: list[bool] = []
        self.saved_packed: list[int] = []
        self.saved_unpacked_at: list[int] = []
        self.saved_released_at: list[int] = []
        self.call_module: list[int] = []
        self.call_parent: list[int] = []
        self.call_start: list[int] = []
        self.call_end: list[int] = []
        self.call_sequence: list[int] = []
        self.call_sequence_end: list[int] = []
        self.call_inputs: list[tuple[int, ...]] = []
        self.call_outputs: list[tuple[int, ...]] = []
        self.call_stack: list[int] = []
        self.marks: list[tuple[str, int]] = []
        # Autograd's sequence number at each change of the innermost running call, for nodes seen again in backward.
        self._change_sequence: list[int] = []
        self._change_call: list[int] = []
        self._live: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # -- storages --------------------------------------------------------------------------------------------------

    def existing(self, tensor: Tensor, category: Category) -> int:
        """Registers a storage that was there before the step; tied ones count once, under their first category."""
        index = self._find(tensor)
        return index if index >= 0 else self._new_storage(tensor, category, birth=-1)

    def categorise(self, tensor: Tensor, category: Category) -> None:
        """Names what a storage of this step turned out to be. What existed before keeps its category."""
        index = self._find(tensor)
        if index < 0:
            index = self._new_storage(tensor, category, birth=len(self.op_name))
        if self.storage_category[index] is None or self.storage_birth[index] >= 0:
            self.storage_category[index] = category

    def alias(self, tensor: Tensor, saved_index: int) -> None:
        """Says that this tensor holds the bytes of a saved one that had been moved away."""
        self._stands_for(tensor, self.saved_storage[saved_index])

    def stands_for(self, tensor: Tensor, original: Tensor) -> None:
        """Says that this tensor holds the bytes of a known one, which has none any more."""
        index = self._find(original)
        if index >= 0:
            self._stands_for(tensor, index)

    def _stands_for(self, tensor: Tensor, index: int) -> None:
        storage = tensor.untyped_storage()
        key = identity_of(storage)
        if key in self._live:
            return
        self._live[key] = index
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]

    def _forget(self, key: int) -> None:
        self._live.pop(key, None)
        self._references.pop(key, None)

    def _find(self, tensor: Tensor) -> int:
        try:
            return self._live.get(identity_of(tensor.untyped_storage()), -1)
        except (NotImplementedError, RuntimeError):  # tensors without a storage of their own, e.g. sparse ones
            return -2

    def _index(self, tensor: Tensor, birth: int) -> int:
        index = self._find(tensor)
        return index if index != -1 else self._new_storage(tensor, None, birth)

    def _new_storage(self, tensor: Tensor, category: Category | None, birth: int) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -2
        index = len(self.storage_bytes)
        key = identity_of(storage)
        self.storage_bytes.append(storage.nbytes())
        self.storage_device.append(str(tensor.device))
        self.storage_category.append(category)
        self.storage_birth.append(birth)
        self.storage_died.append(-1)
        self.storage_shape.append(tuple(tensor.shape))
        self.storage_line.append(self.op_line[birth] if 0 <= birth < len(self.op_line) else -1)
        self.storage_dtype.append(str(tensor.dtype).removeprefix("torch."))
        self._live[key] = index

        def died(_: Any) -> None:
            self.storage_died[index] = len(self.op_name)
            self._forget(key)

        self._references[key] = weakref.ref(storage, died)
        return index

    # -- operations ------------------------------------------------------------------------------------------------

    def begin_op(self, name: str, phase: Phase, sequence: int, line: int, inputs: list[Tensor]) -> int:
        """Opens an operation; storages never seen before that it reads were there before the step: inputs."""
        index = len(self.op_name)
        read = tuple(dict.fromkeys(i for t in inputs if (i := self._index(t, -1)) >= 0))
        self.op_name.append(name)
        self.op_phase.append(phase)
        self.op_call.append(self.call_stack[-1] if self.call_stack else -1)
        self.op_line.append(line)
        self.op_sequence.append(sequence)
        self.op_seconds.append(0.0)
        self.op_flops.append(0)
        self.op_inputs.append(read)
        self.op_outputs.append(())
        self.op_writes.append(())
        return index

    def end_op(self, index: int, seconds: float, flops: int, outputs: list[Tensor], written: list[Tensor]) -> None:
        """Closes an operation; storages never seen before among its results were born in it."""
        self.op_seconds[index] = seconds
        self.op_flops[index] = flops
        self.op_outputs[index] = tuple(dict.fromkeys(i for t in outputs if (i := self._index(t, index)) >= 0))
        if written:
            self.op_writes[index] = tuple(dict.fromkeys(i for t in written if (i := self._find(t)) >= 0))

    def born_bytes(self, index: int) -> int:
        """Bytes of the storages that an operation allocated and returned."""
        return sum(self.storage_bytes[i] for i in self.op_outputs[index] if self.storage_birth[i] == index)

    def workspace(self, index: int, num_bytes: int) -> None:
        """Bytes an operation allocated for itself and freed before it returned: a storage that lives while it runs."""
        if num_bytes <= 0:
            return
        result = next(iter(self.op_outputs[index]), -1)
        self.storage_bytes.append(num_bytes)
        self.storage_device.append(self.storage_device[result] if result >= 0 else "cpu")
        self.storage_category.append(None)
        self.storage_birth.append(index)
        self.storage_died.append(index + 1)
        self.storage_shape.append(self.storage_shape[result] if result >= 0 else ())
        self.storage_line.append(self.op_line[index])
        self.storage_dtype.append("uint8")
        self.op_workspace[index] = len(self.storage_bytes) - 1

    # -- saved tensors ---------------------------------------------------------------------------------------------

    def saved(self, tensor: Tensor) -> int:
        """Autograd saved a tensor; returns the number of this saving.

        Arguments are saved before their operation runs, results after it: a storage never seen before is an input.
        """
        self.saved_storage.append(self._index(tensor, -1))
        self.saved_bytes.append(tensor.numel() * tensor.element_size())
        self.saved_call.append(self.call_stack[-1] if self.call_stack else -1)
        self.saved_packed.append(len(self.op_name))
        self.saved_unpacked_at.append(-1)
        self.saved_released_at.append(-1)
        return len(self.saved_storage) - 1

    def saved_unpacked(self, index: int) -> None:
        """Backward asked for a saved tensor."""
        if self.saved_unpacked_at[index] < 0:
            self.saved_unpacked_at[index] = len(self.op_name)

    def saved_released(self, index: int) -> None:
        """The last holder of a saved tensor let go of it."""
        self.saved_released_at[index] = len(self.op_name)

    # -- module calls and marks ------------------------------------------------------------------------------------

    def enter_call(self, module: int, sequence: int) -> None:
        """A module's forward begins."""
        call = len(self.call_module)
        self.call_module.append(module)
        self.call_parent.append(self.call_stack[-1] if self.call_stack else -1)
        self.call_start.append(len(self.op_name))
        self.call_end.append(-1)
        self.call_sequence.append(sequence)
        self.call_sequence_end.append(-1)
        self.call_inputs.append(())
        self.call_outputs.append(())
        self.call_stack.append(call)
        self._changed(sequence, call)

    def leave_call(self, module: int, sequence: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A module's forward ends; calls that an exception cut short below it end with it."""
        while self.call_stack:
            call = self.call_stack.pop()
            self.call_end[call] = len(self.op_name)
            self.call_sequence_end[call] = sequence
            if self.call_module[call] == module:
                self.call_inputs[call] = tuple(dict.fromkeys(i for t in inputs if (i := self._find(t)) >= 0))
                self.call_outputs[call] = tuple(dict.fromkeys(i for t in outputs if (i := self._find(t)) >= 0))
                break
        self._changed(sequence, self.call_stack[-1] if self.call_stack else -1)

    def _changed(self, sequence: int, call: int) -> None:
        self._change_sequence.append(sequence)
        self._change_call.append(call)

    def call_of_node(self, sequence: int) -> int:
        """The call during which the autograd node of this sequence number was created; -1 for none."""
        position = bisect_right(self._change_sequence, sequence) - 1
        return self._change_call[position] if position >= 0 else -1

    def mark(self, name: str) -> None:
        """A phase, or what else has no operation of its own, begins at the next one."""
        self.marks.append((name, len(self.op_name)))

    def has_mark(self, name: str) -> bool:
        """Whether a phase of this name has begun in this step."""
        return any(mark == name for mark, _ in self.marks)
