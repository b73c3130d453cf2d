"""Greedy choice on memwall's menu: the baseline that the mixed-integer program must not lose to.

Starts from keeping everything and, while the peak is over the budget, makes the one change that costs the least
seconds per byte of true peak removed; then takes back what turned out not to be needed. Only one block differs
between two steps, so bytes and seconds of every possible change are updated from the current state instead of
simulated afresh, which would take longer than the mixed-integer program.
"""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import Choice, Instance, Leaving
from memwall.planning.solver.solve import knob_choices

__all__ = ["solve_greedy"]

_Bytes = NDArray[np.int64]
_Seconds = NDArray[np.float64]


def solve_greedy(instance: Instance) -> Choice | None:
    """Returns a choice within the budget by greedy descent; None where it found none, though one may exist."""
    table = _Table(instance)
    if table.is_hopeless():
        return None
    found = _descend(table, (0,) * len(instance.blocks), instance.budget_bytes)
    verdict = evaluate(instance, found)
    if verdict.fits:
        return Choice(found, verdict.extra_seconds, 0.0)
    answers: list[Choice] = []
    for start in _fallback_starts(instance, table):
        found = _descend(table, start, instance.budget_bytes)
        verdict = evaluate(instance, found)
        if verdict.fits:
            answers.append(Choice(found, verdict.extra_seconds, 0.0))
    return min(answers, key=lambda choice: choice.extra_seconds, default=None)


def _fallback_starts(instance: Instance, table: "_Table") -> Iterator[tuple[int, ...]]:
    """Yields other places to descend from: the knobs, and per block the option that holds least over all rows."""
    yield from knob_choices(instance)
    if len(instance.blocks) and len(instance.rows):
        total = table.held.sum(axis=0)
        total[~table.exists | (table.moved > table.room_bytes)] = np.iinfo(np.int64).max
        yield tuple(int(option) for option in total.argmin(axis=1))


class _Table:
    """The instance as arrays, options padded to the longest menu: held is [rows, blocks, options] bytes."""

    def __init__(self, instance: Instance) -> None:
        blocks, rows = instance.blocks, instance.rows
        num_options = max((len(block.options) for block in blocks), default=1)
        self.instance = instance
        self.link = instance.link
        self.held: _Bytes = np.zeros((len(rows), len(blocks), num_options), dtype=np.int64)
        self.fixed: _Bytes = np.array([row.fixed_bytes for row in rows], dtype=np.int64)
        self.moved: _Bytes = np.zeros((len(blocks), num_options), dtype=np.int64)
        self.hidden: _Bytes = np.zeros((len(blocks), num_options), dtype=np.int64)
        self.seconds: _Seconds = np.zeros((len(blocks), num_options))
        self.leaving: dict[str, _Seconds] = {
            name: np.full((len(blocks), num_options), value) for name, value in asdict(Leaving()).items()
        }
        self.exists = np.zeros((len(blocks), num_options), dtype=np.bool_)
        for i, block in enumerate(blocks):
            count = len(block.options)
            self.moved[i, :count] = [option.moved_bytes for option in block.options]
            self.hidden[i, :count] = [option.hidden_bytes for option in block.options]
            self.seconds[i, :count] = [option.extra_seconds for option in block.options]
            for name, figures in self.leaving.items():
                figures[i, :count] = [getattr(option.leaving, name) for option in block.options]
            self.exists[i, :count] = True
            for r, row in enumerate(rows):
                self.held[r, i, :count] = row.held[i]
        self.forward: _Seconds = np.array([block.forward_seconds for block in blocks])
        self.backward: _Seconds = np.array([block.backward_seconds for block in blocks])
        self.room_bytes = instance.link.capacity_bytes if instance.link else 0

    def is_hopeless(self) -> bool:
        """Some row is over the budget even if every block held the least it can."""
        is_open = self.exists & (self.moved <= self.room_bytes)
        least = np.where(is_open, self.held, np.iinfo(np.int64).max).min(axis=2, initial=np.iinfo(np.int64).max)
        return bool((self.fixed + least.sum(axis=1) > self.instance.budget_bytes).any())

    def seconds_after(self, choice: _Bytes) -> tuple[float, _Seconds]:
        """Extra seconds of `choice`, and [blocks, options] of it with that one block changed to that option."""
        here = np.arange(len(choice))
        own = self.seconds[here, choice]
        after = own.sum() - own[:, None] + self.seconds
        if self.link is not None and self.moved.any():
            after += self._write_stalls_after(choice) + self._read_stalls_after(choice)
        now = float(after[0, choice[0]]) if len(choice) else 0.0
        return now, after

    def _write_stalls_after(self, choice: _Bytes) -> _Seconds:
        # With `ready` the instant a forward may start and `done` the instant the link has sent all there is, one
        # block is a linear step in (max, +). So states before each block and gains from each block to the end give
        # every single change in one step: what evaluate does with a queue, but without walking the chain per change.
        assert self.link is not None
        figures, forward = self.leaving, self.forward[:, None]
        ready_ready, ready_done = forward + figures["wait_seconds"], forward + figures["wait_behind_seconds"]
        done_ready, done_done = figures["done_seconds"], figures["done_behind_seconds"]
        count = len(choice)
        ready, done = np.zeros(count), np.zeros(count)
        at = end = 0.0
        for i, o in enumerate(choice):
            ready[i], done[i] = at, end
            at, end = (
                max(at + float(ready_ready[i, o]), end + float(ready_done[i, o])),
                max(at + float(done_ready[i, o]), end + float(done_done[i, o])),
            )
        from_ready, from_done = np.zeros(count + 1), np.zeros(count + 1)
        # At the end a disk's queue runs empty; what a device's has left never leaves.
        from_done[count] = 0.0 if self.link.piece_bytes else -np.inf
        for i in range(count - 1, -1, -1):
            o = choice[i]
            after_ready, after_done = from_ready[i + 1], from_done[i + 1]
            from_ready[i] = max(float(ready_ready[i, o]) + after_ready, float(done_ready[i, o]) + after_done)
            from_done[i] = max(float(ready_done[i, o]) + after_ready, float(done_done[i, o]) + after_done)
        ready_all = np.maximum(ready[:, None] + ready_ready, done[:, None] + ready_done)
        done_all = np.maximum(ready[:, None] + done_ready, done[:, None] + done_done)
        total = np.maximum(ready_all + from_ready[1:, None], done_all + from_done[1:, None])
        return np.asarray(total - self.forward.sum())

    def _read_stalls_after(self, choice: _Bytes) -> _Seconds:
        # All changes walk the chain side by side, each with what the link has left beside the block before.
        assert self.link is not None
        reads = self.moved / self.link.read_bytes_per_second
        leads = (self.moved - self.hidden) / self.link.read_bytes_per_second
        own = self.backward[:, None] + self.seconds - reads
        stalls, idle = np.zeros(self.moved.shape), np.zeros(self.moved.shape)
        for i in range(len(choice) - 1, -1, -1):
            lead, read, left = (np.full(stalls.shape, each[i, choice[i]]) for each in (leads, reads, own))
            lead[i], read[i], left[i] = leads[i], reads[i], own[i]
            stalls += np.maximum(0.0, lead - idle)
            idle = np.maximum(0.0, left + np.clip(idle, lead, read))
        return stalls


def _descend(table: _Table, start: tuple[int, ...], budget_bytes: int) -> tuple[int, ...]:
    """From `start` to within `budget_bytes`, or as near as single changes lead; never leaves the tier's room."""
    choice = np.array(start, dtype=np.int64)
    here = np.arange(len(choice))
    # Each change lowers (peak, sum of overshoots), or, within the budget, the seconds: it ends; the cap bounds when.
    for _ in range(8 * table.exists.size + 8):
        if not len(table.fixed) or not len(choice):
            break
        held_now = table.held[:, here, choice]
        load = table.fixed + held_now.sum(axis=1)
        loads_after = load[:, None, None] + table.held - held_now[:, :, None]
        peak = int(load.max())
        peaks_after = loads_after.max(axis=0)
        now, after = table.seconds_after(choice)
        moved_now = table.moved[here, choice]
        is_open = table.exists & (moved_now.sum() - moved_now[:, None] + table.moved <= table.room_bytes)
        if peak > budget_bytes:
            removed = (peak - np.maximum(peaks_after, budget_bytes)).astype(np.float64)
            removed[~is_open] = 0.0
            if not (removed > 0).any():
                # Several rows share the peak: no single change lowers it, but one may lower the sum of what is over.
                over = np.maximum(0, load - budget_bytes).sum()
                over_after = np.maximum(0, loads_after - budget_bytes).sum(axis=0)
                removed = np.where(is_open & (peaks_after <= peak), over - over_after, 0).astype(np.float64)
            if not (removed > 0).any():
                break
            rate = np.full(removed.shape, np.inf)
            np.divide(after - now, removed, out=rate, where=removed > 0)
            position = np.lexsort((-removed.ravel(), rate.ravel()))[0]
        else:
            saved = np.where(is_open & (peaks_after <= budget_bytes), now - after, 0.0)
            position = saved.argmax()
            if saved.ravel()[position] <= 1e-9 * max(now, 0.0):
                break
        block, option = divmod(int(position), table.exists.shape[1])
        choice[block] = option
    return tuple(int(option) for option in choice)
