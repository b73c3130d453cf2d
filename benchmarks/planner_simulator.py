"""The judge of the planner benchmark: runs one step under orders and counts bytes and seconds, operation by operation.

Written from what the executor does (memwall/apply) and what a trace's fields mean, without a line of memwall's planner
or of its replay: no memory rows, no intervals, no solver. Memory is a set of buffers with a count of who holds each;
the compute stream, the way out and the way back are three clocks.

- A buffer is held by the code that made it until `dropped`, and by autograd from `packed` to `released`.
- A recomputed block holds its inputs from its forward to the end of its backward, and what its kept operations made.
  Before the first tensor saved in it is asked for, its operations run again, up to the last one that saves something.
- What moves leaves when autograd (or the checkpoint) takes it. The source stays until its copy is let go: when more
  than the window is under way, computing waits for the oldest copy. What is still there in backward need not come back.
- A block's bytes come back from the begin of the backward of the block after it on; computing waits where it asks for
  bytes that are not there yet.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from planner_tape import CostTable

from memwall.trace.records import ModuleCall, Step

# What the executor costs besides the operations it repeats: measured by benchmarks/executor_cost.py on two cores with
# torch 2.13 (2026-11-20), and charged to every arm alike.
CHECKPOINT_SECONDS = 650e-6
SELECT_SECONDS_PER_OP = 40e-6
MIN_MOVED_BYTES = 1 << 20
"""Smaller tensors stay."""


class Order(NamedTuple):
    """What is done with one block."""

    recompute: bool = False
    kept_ops: frozenset[int] = frozenset()
    """Operations of the step whose results a recomputed block keeps."""
    offload: bool = False
    """What the block saves (recomputed: what it was called with) moves to the next tier."""


class Outcome(NamedTuple):
    """What a step under orders needs."""

    peak_bytes: int
    step_seconds: float
    stall_seconds: float
    """The part of the step in which computing waits for the link."""
    moved_bytes: int
    """Out to the next tier."""


class Simulator:
    """One step of one device, ready to be run under any orders: module index -> `Order`."""

    def __init__(self, step: Step, costs: CostTable) -> None:
        self.step, self.costs = step, costs
        num_ops = len(step.ops)
        self.born: list[list[int]] = [[] for _ in range(num_ops)]
        self.dropped: list[list[int]] = [[] for _ in range(num_ops + 1)]
        self.packed: list[list[int]] = [[] for _ in range(num_ops + 1)]
        self.unpacked: list[list[int]] = [[] for _ in range(num_ops + 1)]
        self.released: list[list[int]] = [[] for _ in range(num_ops + 1)]
        for index, storage in enumerate(step.storages):
            if storage.birth >= 0:
                self.born[storage.birth].append(index)
            self.dropped[storage.dropped].append(index)
        for number, save in enumerate(step.saved):
            self.packed[save.packed].append(number)
            self.unpacked[save.unpacked].append(number)
            self.released[save.released].append(number)
        self.calls = sorted(step.calls, key=lambda call: call.start)
        self.saves_of = [
            [n for n, s in enumerate(step.saved) if s.module == call.module and call.start <= s.packed <= call.end]
            for call in self.calls
        ]
        self.call_of_save = {save: place for place, saves in enumerate(self.saves_of) for save in saves}
        self.call_of_module = {call.module: place for place, call in enumerate(self.calls)}
        self._known: dict[tuple[int, frozenset[tuple[int, Order]]], Outcome] = {}

    def run(self, orders: Mapping[int, Order], window_bytes: int | None = None) -> Outcome:
        """Returns what the step needs under the orders; blocks without one do as PyTorch does.

        Args:
            orders: module index -> what is done with it.
            window_bytes: the most that may be on its way out; None for the cost table's.

        Raises:
            KeyError: an order for a module that has no call.
        """
        window_bytes = self.costs.window_bytes if window_bytes is None else window_bytes
        key = (window_bytes, frozenset(orders.items()))
        if key not in self._known:
            by_call = {self.call_of_module[module]: order for module, order in orders.items()}
            self._known[key] = _Run(self, by_call, window_bytes).outcome()
        return self._known[key]


class _Entry:
    """Bytes that left."""

    def __init__(self, storage: int, nbytes: int, copied_at: float) -> None:
        self.storage, self.nbytes, self.copied_at = storage, nbytes, copied_at
        self.is_leaving = True
        """The source is still held for the copy."""
        self.num_waiting = 0
        """Who will ask for it back and has not been done with it."""
        self.buffer = -1
        """Where it is back, or on its way back; -1: nowhere."""
        self.ready_at = 0.0


class _Run:
    """One simulated step. Buffers are numbered: forward's storages, then what is made again, then what comes back."""

    def __init__(self, plan: Simulator, orders: Mapping[int, Order], window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.plan, self.orders, self.costs = plan, orders, plan.costs
        storages = plan.step.storages
        self.sizes = [storage.nbytes for storage in storages]
        self.again, self.back = len(storages), 2 * len(storages)
        self.sizes *= 3
        self.holders = [0] * len(self.sizes)
        self.live_bytes = self.peak_bytes = 0
        self.now = self.out_free_at = self.back_free_at = self.stall_seconds = 0.0
        self.moved_bytes = self.leaving_bytes = 0
        self.leaving: deque[_Entry] = deque()
        self.entries: dict[int, _Entry] = {}
        self.held_by: dict[int, int] = {}
        """Saved tensor -> buffer it holds."""
        self.moved_saves: dict[int, _Entry] = {}
        self.moved_inputs: dict[int, list[_Entry]] = {}
        self.is_done_again: set[int] = set()
        self.kept = {op for order in orders.values() if order.recompute for op in order.kept_ops}
        """Operations whose results are held from forward until they are wanted again."""

    def outcome(self) -> Outcome:
        plan, step = self.plan, self.plan.step
        begins = {call.start: place for place, call in enumerate(plan.calls)}
        ends_back = {call.backward_end: place for place, call in enumerate(plan.calls)}
        begins_back = {call.backward_start: place for place, call in enumerate(plan.calls)}
        for index, storage in enumerate(step.storages):
            if storage.birth < 0:
                self._hold(index)
        for number, op in enumerate(step.ops):
            for save in plan.packed[number]:
                self._pack(save)
            for index in plan.dropped[number]:
                self._let_go(index)
            for save in plan.released[number]:
                self._release(save)
            if number in ends_back:
                self._end_backward(ends_back[number])
            if number in begins:
                self._begin_forward(begins[number])
            if number in begins_back:
                self._begin_backward(begins_back[number])
            for save in plan.unpacked[number]:
                self._unpack(save)
            for index in plan.born[number]:
                self._hold(index)
                if number in self.kept:
                    self._hold(index)
            self.now += op.seconds
        self.now += self.costs.copy_seconds_per_byte * self.moved_bytes
        return Outcome(self.peak_bytes, self.now, self.stall_seconds, self.moved_bytes)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _hold(self, buffer: int) -> None:
        if self.holders[buffer] == 0:
            self.live_bytes += self.sizes[buffer]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.holders[buffer] += 1

    def _let_go(self, buffer: int) -> None:
        self.holders[buffer] -= 1
        assert self.holders[buffer] >= 0, "a buffer was let go more often than held"
        if self.holders[buffer] == 0:
            self.live_bytes -= self.sizes[buffer]

    def _moves(self, index: int) -> bool:
        storage = self.plan.step.storages[index]
        return storage.nbytes >= MIN_MOVED_BYTES and storage.category in ("activation", "temporary", "input")

    def _wait_until(self, instant: float) -> None:
        if instant > self.now:
            self.stall_seconds += instant - self.now
            self.now = instant

    # -- forward ---------------------------------------------------------------------------------------------------

    def _begin_forward(self, place: int) -> None:
        """A recomputed block takes hold of what it was called with."""
        order = self.orders.get(place)
        if order is None or not order.recompute:
            return
        for index in self._activations(self.plan.calls[place]):
            if order.offload and self._moves(index):
                self.moved_inputs.setdefault(place, []).append(self._park(index))
            else:
                self._hold(index)

    def _activations(self, call: ModuleCall) -> list[int]:
        storages = self.plan.step.storages
        return [i for i in call.inputs if storages[i].birth >= 0 and storages[i].category != "parameter"]

    def _pack(self, save: int) -> None:
        """Autograd takes a tensor: holds it, sends it away, or leaves it to the recomputation."""
        index = self.plan.step.saved[save].storage
        place = self.plan.call_of_save.get(save)
        order = self.orders.get(place) if place is not None else None
        if order is not None and order.recompute:
            return
        if order is not None and order.offload and self._moves(index):
            self.moved_saves[save] = self._park(index)
        else:
            self.held_by[save] = index
            self._hold(index)

    def _park(self, index: int) -> _Entry:
        """Sends a storage away, once."""
        entry = self.entries.get(index)
        if entry is None:
            nbytes = self.sizes[index]
            begin = max(self.now, self.out_free_at)
            self.out_free_at = begin + nbytes / self.costs.write_bytes_per_second
            entry = self.entries[index] = _Entry(index, nbytes, self.out_free_at)
            self._hold(index)
            self.leaving.append(entry)
            self.moved_bytes += nbytes
            self.leaving_bytes += nbytes
            while self.leaving_bytes > self.window_bytes:
                oldest = self.leaving.popleft()
                if oldest.is_leaving:
                    self._wait_until(oldest.copied_at)
                    self._forget_source(oldest)
        entry.num_waiting += 1
        return entry

    def _forget_source(self, entry: _Entry) -> None:
        entry.is_leaving = False
        self.leaving_bytes -= entry.nbytes
        self._let_go(entry.storage)

    # -- backward --------------------------------------------------------------------------------------------------

    def _begin_backward(self, place: int) -> None:
        """The block before this one begins to come back; the last block's own bytes do so only now."""
        if place == len(self.plan.calls) - 1:
            self._bring_back(place)
        if place > 0:
            self._bring_back(place - 1)

    def _bring_back(self, place: int) -> None:
        moved = [self.moved_saves[s] for s in reversed(self.plan.saves_of[place]) if s in self.moved_saves]
        for save in self.plan.saves_of[place]:
            if save in self.moved_saves:
                self.held_by[save] = self._load(self.moved_saves[save])
        for entry in self.moved_inputs.get(place, ()):
            self._load(entry)
        # Read in the order backward asks: what was saved last comes first.
        for entry in dict.fromkeys((*moved, *self.moved_inputs.get(place, ()))):
            if entry.ready_at < 0.0:
                begin = max(self.now, self.back_free_at, entry.copied_at)
                self.back_free_at = entry.ready_at = begin + entry.nbytes / self.costs.read_bytes_per_second

    def _load(self, entry: _Entry) -> int:
        """Holds the buffer that has the bytes; a new one is yet to be read (`ready_at` below 0)."""
        if entry.buffer < 0:
            entry.buffer = entry.storage if entry.is_leaving else self.back + entry.storage
            entry.ready_at = 0.0 if entry.is_leaving else -1.0
        self._hold(entry.buffer)
        return entry.buffer

    def _done_with(self, entry: _Entry) -> None:
        """One who asked for the bytes lets go of them."""
        self._let_go(entry.buffer)
        entry.num_waiting -= 1
        if entry.num_waiting == 0:
            if entry.is_leaving:
                self._forget_source(entry)
            del self.entries[entry.storage]
        elif not entry.is_leaving and self.holders[entry.buffer] == 0:
            entry.buffer = -1

    def _unpack(self, save: int) -> None:
        """Backward asks for a saved tensor."""
        place = self.plan.call_of_save.get(save)
        if place is not None and place in self.orders and self.orders[place].recompute:
            if place not in self.is_done_again:
                self.is_done_again.add(place)
                self._recompute(place, self.orders[place])
        elif save in self.moved_saves:
            self._wait_until(self.moved_saves[save].ready_at)

    def _recompute(self, place: int, order: Order) -> None:
        """Runs a block's operations again, up to the last one that saves something."""
        plan, step = self.plan, self.plan.step
        call, saves = plan.calls[place], plan.saves_of[place]
        self.now += CHECKPOINT_SECONDS
        if order.kept_ops:
            self.now += SELECT_SECONDS_PER_OP * (call.end - call.start)
        for entry in self.moved_inputs.get(place, ()):
            self._wait_until(entry.ready_at)
        moved_inputs = {entry.storage: entry.buffer for entry in self.moved_inputs.get(place, ())}
        wanted: dict[int, list[int]] = {}
        for save in saves:
            wanted.setdefault(step.saved[save].storage, []).append(save)
        last = max(step.saved[save].packed for save in saves)
        held_by_code: list[tuple[int, int]] = []
        for save in saves:
            index = step.saved[save].storage
            if not call.start <= step.storages[index].birth < call.end:
                self.held_by[save] = moved_inputs.get(index, index)
                self._hold(self.held_by[save])
        for number in range(call.start, last):
            for dropped_at, buffer in [held for held in held_by_code if held[0] <= number]:
                held_by_code.remove((dropped_at, buffer))
                self._let_go(buffer)
            is_kept = number in order.kept_ops
            for index in plan.born[number]:
                buffer = index if is_kept else self.again + index
                self._hold(buffer)
                held_by_code.append((step.storages[index].dropped, buffer))
                for save in wanted.get(index, ()):
                    self.held_by[save] = buffer
                    self._hold(buffer)
                if is_kept:
                    self._let_go(index)
            if not is_kept:
                self.now += step.ops[number].seconds
        for _, buffer in held_by_code:
            self._let_go(buffer)
        for number in order.kept_ops:
            if number >= last:  # the recomputation stops before it would ask for these
                for index in plan.born[number]:
                    self._let_go(index)

    def _release(self, save: int) -> None:
        """Backward is done with a saved tensor."""
        if save in self.moved_saves:
            del self.held_by[save]
            self._done_with(self.moved_saves.pop(save))
        elif save in self.held_by:
            self._let_go(self.held_by.pop(save))

    def _end_backward(self, place: int) -> None:
        """A recomputed block lets go of what it was called with."""
        order = self.orders.get(place)
        if order is None or not order.recompute:
            return
        moved = self.moved_inputs.pop(place, [])
        for entry in moved:
            self._done_with(entry)
        for index in self._activations(self.plan.calls[place]):
            if index not in {entry.storage for entry in moved}:
                self._let_go(index)
