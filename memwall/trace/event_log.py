"""The growing log of a step: storages, operations, saved tensors and module calls, before they become records.

An index of -1 stands for a storage that was never seen, -2 for a tensor without one of its own, such as a sparse one.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable
from sys import intern
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from memwall.torch_internals.storages import identity_of
from memwall.trace.records import Category, Phase


class LoggedOp(Struct, gc=False):
    """Holds one operation while its step runs; indices are those of the log."""

    name: str
    phase: Phase
    call: int
    """The innermost module call that it was issued in; -1 for none."""
    line: int
    sequence: int
    """The sequence number of the autograd node that ran it; -1 in forward."""
    inputs: tuple[int, ...]
    seconds: float = 0.0
    flops: int = 0
    outputs: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()
    """The storages that stand for what it allocated for itself."""


class LoggedStorage(Struct, gc=False):
    """Holds one block of memory while its step runs."""

    nbytes: int
    device: str
    category: Category | None
    """None until the step shows what it is."""
    birth: int
    shape: tuple[int, ...]
    """The shape of the first tensor in it."""
    line: int
    dtype: str
    died: int = -1
    """The operation before which it died; -1 while it lives."""
    copied: tuple[int, ...] = ()
    """Bytes of each tensor that it was put together from."""
    stream: int = 0
    unit: int = -1
    """The module that has gathered it of its parts."""


class LoggedSaving(Struct, gc=False):
    """Holds one tensor that autograd saved, while its step runs."""

    storage: int
    nbytes: int
    call: int
    packed: int
    was_moved: bool = False
    """Whether it left the device while the step was recorded."""
    unpacked: int = -1
    released: int = -1


class LoggedCall(Struct, gc=False):
    """Holds one call of a module while its step runs."""

    module: int
    parent: int
    start: int
    end: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


class EventLog:
    """Holds what happened, in order. Appending is all that is done while the step runs, to keep it cheap."""

    def __init__(self) -> None:
        self.micro_batch = 0
        self.input_shape: tuple[int, ...] = ()
        self.input_dtype = ""
        self.ops: list[LoggedOp] = []
        self.storages: list[LoggedStorage] = []
        self.savings: list[LoggedSaving] = []
        self.calls: list[LoggedCall] = []
        self.call_stack: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.launch_seconds = 0.0
        """Holds the seconds that the host took to issue an operation of a device that works behind it."""
        self._streams = {0: 0}
        """Numbers of streams, by their handles."""
        self._stream = 0
        # Autograd's sequence number at each change of the innermost running call, for nodes seen again in backward.
        self._change_sequence: list[int] = []
        self._change_call: list[int] = []
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Holds one of each that are equal: a step has few shapes, and as many storages as operations."""
        self._live: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def forget(self) -> None:
        """Lets go of what was noted, once records are made of it: whoever still holds the log holds next to nothing.

        A hook that is being called may hold it through all of planning, and what it noted of storages holds it in turn.
        What ends later, as a saved tensor of a graph that is kept, is no longer noted.
        """
        noted = (self.ops, self.storages, self.savings, self.calls, self.call_stack, self.marks)
        known = (self._change_sequence, self._change_call, self._shapes, self._live, self._references)
        for each in (*noted, *known):
            each.clear()

    @property
    def _call(self) -> int:
        return self.call_stack[-1] if self.call_stack else -1

    # -- storages --------------------------------------------------------------------------------------------------

    def existing(self, tensor: Tensor, category: Category) -> int:
        """Registers a storage that was there before the step; tied ones count once, under their first category."""
        index = self._find(tensor)
        return index if index >= 0 else self._new_storage(tensor, category, birth=-1)

    def put_together(self, parts: list[Tensor]) -> None:
        """Notes that the storage of these tensors was made of copies of each, where they share one."""
        index, *others = {self._find(part) for part in parts} or {-1}
        if len(parts) > 1 and index >= 0 and not others:
            self.storages[index].copied = tuple(part.nbytes for part in parts)

    def categorise(self, tensor: Tensor, category: Category) -> None:
        """Names what a storage of this step turned out to be. What existed before keeps its category."""
        index = self._find(tensor)
        if index == -1:
            index = self._new_storage(tensor, category, birth=len(self.ops))
        if index < 0:  # it has no storage of its own
            return
        storage = self.storages[index]
        if storage.category is None or storage.birth >= 0:
            storage.category = category

    def category_of(self, tensor: Tensor) -> Category | None:
        """Returns what a tensor's storage is known as; None where nothing is known of it."""
        index = self._find(tensor)
        return self.storages[index].category if index >= 0 else None

    def is_born(self, tensor: Tensor) -> bool:
        """Tells whether a tensor's storage was made in the step."""
        index = self._find(tensor)
        return index >= 0 and self.storages[index].birth >= 0

    def index_of(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage; a negative one where nothing is known of it."""
        return self._find(tensor)

    def alias(self, tensor: Tensor, saved_index: int) -> None:
        """Says that this tensor holds the bytes of a saved one that had been moved away."""
        if saved_index >= len(self.savings):  # forgotten
            return
        saving = self.savings[saved_index]

        def died() -> None:
            # Compiled code has autograd let go of what it saved, and goes on with it: in a plain step with the same.
            if saving.released >= 0:
                saving.released = max(saving.released, len(self.ops))

        self._stands_for(tensor, saving.storage, died)

    def note_size(self, tensor: Tensor, unit: int) -> None:
        """Notes that a storage was emptied or filled since the last operation, as FSDP2 does with what it gathers.

        Args:
            unit: the module that gathers it.
        """
        storage = tensor.untyped_storage()
        key, num_bytes = identity_of(storage), storage.nbytes()
        index = self._live.get(key, -1)
        if index >= 0 and not num_bytes:
            self.storages[index].died = len(self.ops)
            self._forget(key)
        elif index < 0 and num_bytes:
            index = self._new_storage(tensor, "temporary", birth=len(self.ops))
        if index >= 0 and num_bytes:
            self.storages[index].unit = unit

    def forget_units(self) -> None:
        """Says of no storage any more which module has gathered it."""
        for storage in self.storages:
            storage.unit = -1

    def stands_for(self, tensor: Tensor, original: Tensor) -> None:
        """Says that this tensor holds the bytes of a known one, which has none any more."""
        index = self._find(original)
        if index >= 0:
            self._stands_for(tensor, index)

    def _stands_for(self, tensor: Tensor, index: int, at_end: Callable[[], None] = lambda: None) -> None:
        storage = tensor.untyped_storage()
        key = identity_of(storage)
        if key in self._live:
            return
        self._live[key] = index

        def died(_: Any) -> None:
            at_end()
            self._forget(key)

        self._references[key] = weakref.ref(storage, died)

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

    def _known(self, tensors: list[Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(i for t in tensors if (i := self._find(t)) >= 0))

    def _new_storage(self, tensor: Tensor, category: Category | None, birth: int) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -2
        index = len(self.storages)
        key, shape = identity_of(storage), tuple(tensor.shape)
        logged = LoggedStorage(
            nbytes=storage.nbytes() or (tensor.nbytes if category == "parameter" else 0),  # its elements may be away
            device=intern(str(tensor.device)),
            category=category,
            birth=birth,
            shape=self._shapes.setdefault(shape, shape),
            line=self.ops[birth].line if 0 <= birth < len(self.ops) else -1,
            dtype=intern(str(tensor.dtype).removeprefix("torch.")),
            stream=self._stream if birth >= 0 else 0,
        )
        self.storages.append(logged)
        self._live[key] = index

        def died(_: Any) -> None:
            logged.died = len(self.ops)
            self._forget(key)

        self._references[key] = weakref.ref(storage, died)
        return index

    # -- operations ------------------------------------------------------------------------------------------------

    def begin_on(self, handle: int) -> None:
        """Says which of a device's streams is current from now on: what is allocated is for that one."""
        self._stream = self._streams.setdefault(handle, len(self._streams))

    def begin_op(self, name: str, phase: Phase, sequence: int, line: int, inputs: list[Tensor]) -> int:
        """Opens an operation; storages never seen before that it reads were there before the step: inputs."""
        if self.ops and "reduce_scatter" in self.ops[-1].name:
            self._note_divided(self.ops[-1], inputs)
        read = tuple(dict.fromkeys(i for t in inputs if (i := self._index(t, -1)) >= 0))
        self.ops.append(LoggedOp(intern(name), phase, self._call, line, sequence, read))
        return len(self.ops) - 1

    def _note_divided(self, collective: LoggedOp, inputs: list[Tensor]) -> None:
        """Notes that a collective has made what is read as its end is waited for: gloo divides a copy of its own."""
        for tensor in inputs:
            if self._find(tensor) == -1:
                own = (self.storages[index] for index in collective.workspaces)
                nbytes = tensor.untyped_storage().nbytes()
                counted = next((each for each in own if each.nbytes >= nbytes), None)
                if counted is not None:  # otherwise nothing that the collective has taken is as large
                    counted.nbytes -= nbytes
                    self._new_storage(tensor, "temporary", birth=len(self.ops) - 1)

    def born(self, index: int, results: list[Tensor]) -> None:
        """Notes some of an operation's results before the others."""
        for result in results:
            self._index(result, index)

    def end_op(self, index: int, seconds: float, flops: int, outputs: list[Tensor], written: list[Tensor]) -> None:
        """Closes an operation; storages never seen before among its results were born in it."""
        op = self.ops[index]
        op.seconds, op.flops = seconds, flops
        op.outputs = tuple(dict.fromkeys(i for t in outputs if (i := self._index(t, index)) >= 0))
        op.writes = self._known(written)

    def work_of(self, index: int) -> tuple[int, int]:
        """Returns the bytes of what an operation reads, makes and changes, and its floating-point operations.

        One that makes and changes nothing, such as a view, moves no bytes.
        """
        op = self.ops[index]
        written = self.born_bytes(index) + sum(self.storages[i].nbytes for i in op.writes)
        return written and written + sum(self.storages[i].nbytes for i in op.inputs), op.flops

    def born_bytes(self, index: int) -> int:
        """Returns the bytes of the storages that an operation allocated and returned."""
        results = (self.storages[i] for i in self.ops[index].outputs)
        return sum(storage.nbytes for storage in results if storage.birth == index)

    def workspaces(self, index: int, blocks: tuple[int, ...]) -> None:
        """Notes what an operation allocates for itself and frees before it returns: it lives while that runs.

        Storages are numbered in the order of allocation: what comes ahead of results is to be noted before they are.
        """
        op = self.ops[index]
        known = op.outputs or op.inputs
        result = self.storages[known[0]] if known else None
        begin = len(self.storages)
        self.storages.extend(
            LoggedStorage(
                nbytes=int(num_bytes),
                device=result.device if result is not None else "cpu",
                category=None,
                birth=index,
                shape=result.shape if result is not None else (),
                line=op.line,
                dtype="uint8",
                died=index + 1,
                stream=self._stream,
            )
            for num_bytes in blocks
            if num_bytes > 0
        )
        op.workspaces += tuple(range(begin, len(self.storages)))

    # -- saved tensors ---------------------------------------------------------------------------------------------

    def saved(self, tensor: Tensor) -> int:
        """Notes that autograd saved a tensor; returns the number of this saving.

        Arguments are saved before their operation runs, results after it: a storage never seen before is an input.
        """
        storage = self._index(tensor, -1)
        self.savings.append(
            LoggedSaving(storage, tensor.numel() * tensor.element_size(), self._call, packed=len(self.ops))
        )
        return len(self.savings) - 1

    def saved_unpacked(self, index: int) -> None:
        """Notes that backward asked for a saved tensor."""
        if index < len(self.savings) and self.savings[index].unpacked < 0:
            self.savings[index].unpacked = len(self.ops)

    def saved_released(self, index: int) -> None:
        """Notes that the last holder of a saved tensor let go of it."""
        if index < len(self.savings):
            self.savings[index].released = len(self.ops)

    @property
    def is_dropped(self) -> bool:
        """Returns whether tensors were saved, and autograd has let go of all of them without a backward."""
        return bool(self.savings) and all(each.unpacked < 0 <= each.released for each in self.savings)

    # -- module calls and marks ------------------------------------------------------------------------------------

    def enter_call(self, module: int, sequence: int) -> None:
        """Notes that a module's forward begins."""
        call = len(self.calls)
        self.calls.append(LoggedCall(module, self._call, start=len(self.ops)))
        self.call_stack.append(call)
        self._changed(sequence, call)

    def leave_call(self, module: int, sequence: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Notes that a module's forward ends; calls that an exception cut short below it end with it."""
        while self.call_stack:
            call = self.calls[self.call_stack.pop()]
            call.end = len(self.ops)
            if call.module == module:
                call.inputs, call.outputs = self._known(inputs), self._known(outputs)
                break
        self._changed(sequence, self._call)

    def _changed(self, sequence: int, call: int) -> None:
        self._change_sequence.append(sequence)
        self._change_call.append(call)

    def call_of_node(self, sequence: int) -> int:
        """Returns the call during which the autograd node of this sequence number was created; -1 for none."""
        position = bisect_right(self._change_sequence, sequence) - 1
        return self._change_call[position] if position >= 0 else -1

    def mark(self, name: str) -> None:
        """Notes that a phase, or what else has no operation of its own, begins at the next one."""
        self.marks.append((name, len(self.ops)))

    def has_mark(self, name: str) -> bool:
        """Returns whether a phase of this name has begun in this step."""
        return any(mark == name for mark, _ in self.marks)
