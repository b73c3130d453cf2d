"""The memory rows of a step: what it holds in each stretch of operations, and what a treated block changes there."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_curve
from memwall.predict.lives import LAST, Life
from memwall.predict.treatment import StepModel

Int64s = NDArray[np.int64]


class StepRows:
    """Holds rows at every block of forward, at the loss, at every block of backward and around them.

    A row covers a stretch of operations. Within a block's own stretch the highest point of step and option together
    counts; elsewhere what an option holds or frees there. Both are upper bounds of what options do together, but for
    one case: a checkpoint that holds a tensor which only another block saved (found: up to 2 % of the peak). The search
    therefore replays what it chose.

    What a treatment changes is worked out once: menus for windows of several sizes have the same treatments.

    Args:
        in_chain: whether a block that lets go of what earlier ones have saved as their results frees it, as where they
            let go of it as well. Of a chain of such blocks each frees nothing by itself.
    """

    def __init__(self, model: StepModel, device: str, *, in_chain: bool = False) -> None:
        self._model, self._device, self._in_chain = model, device, in_chain
        self._changes: dict[tuple[int, Treatment], tuple[Int64s, int]] = {}

    @cached_property
    def named(self) -> list[tuple[str, int]]:
        """Returns the name of each row, and the bytes that the plain step holds there at most."""
        _, labels, _ = self._stretches
        return list(zip(labels, map(int, self._base_peaks), strict=True))

    @cached_property
    def nothing(self) -> Int64s:
        """Returns the column of a block that keeps everything."""
        return np.zeros(len(self._stretches[0]), dtype=np.int64)

    @cached_property
    def untouchable_bytes(self) -> int:
        """Returns the most bytes that the step holds of what no treatment of any block changes."""
        touched = self._model.touched
        kept = (storage for index, storage in enumerate(self._model.step.storages) if index not in touched)
        return int(live_curve(kept, len(self._model.step.ops), device=self._device).max())

    def column(self, block: int, treatment: Treatment) -> Int64s:
        """Returns the bytes that a treatment of one block adds to each row."""
        return self._change(block, treatment)[0]

    def freed_bytes(self, block: int, treatment: Treatment) -> int:
        """Returns the bytes that a treatment takes off the device between the block's forward and its backward."""
        return self._change(block, treatment)[1]

    def _change(self, block: int, treatment: Treatment) -> tuple[Int64s, int]:
        key = block, treatment
        if key not in self._changes:
            gone, come = self._model.changed_lives(block, treatment, in_chain=self._in_chain)
            self._changes[key] = self._column(block, treatment, gone, come), self._freed_bytes(block, gone, come)
        return self._changes[key]

    def _freed_bytes(self, block: int, gone: Sequence[Life], come: Sequence[Life]) -> int:
        call = next(call for call in self._model.blocks[block].calls if call.backward_start >= 0)
        between = (call.end, LAST + 1)
        held = [sum(life.nbytes for life in lives if life.begin < between < life.end) for lives in (gone, come)]
        return held[0] - held[1]

    @cached_property
    def _curve(self) -> Int64s:
        return live_curve(self._model.step.storages, len(self._model.step.ops), device=self._device)

    @cached_property
    def _before(self) -> Int64s:
        """Returns the bytes live just before each operation: what it makes is not there yet."""
        before = self._curve.copy()
        for storage in self._model.step.storages:
            if storage.birth >= 0 and storage.birth < storage.death and self._is_here(storage.device):
                before[storage.birth] -= storage.nbytes
        return before

    @cached_property
    def _base_peaks(self) -> Int64s:
        return np.maximum.reduceat(self._curve, self._stretches[0])

    def _is_here(self, device: str) -> bool:
        return device.partition(":")[0] == self._device

    @cached_property
    def _stretches(self) -> tuple[NDArray[np.intp], list[str], list[int]]:
        """Returns consecutive stretches of the step: where each begins, its name, and the block it belongs to or -1."""
        model, step = self._model, self._model.step
        owner = np.full(len(step.ops), -1, dtype=np.int64)
        side = np.zeros(len(step.ops), dtype=np.int64)
        for b, block in enumerate(model.blocks):
            for call in block.calls:
                owner[call.start : call.end] = b
                side[call.start : call.end] = 1
                if call.backward_start >= 0:
                    owner[call.backward_start : call.backward_end] = b
                    side[call.backward_start : call.backward_end] = 2
        phases = [op.phase for op in step.ops]
        bounds, labels, owners = [], [], []
        names = {1: "forward", 2: "backward"}
        for op in range(len(step.ops)):
            if op and owner[op] == owner[op - 1] and side[op] == side[op - 1] and phases[op] == phases[op - 1]:
                continue
            bounds.append(op)
            owners.append(int(owner[op]))
            if owner[op] >= 0:
                labels.append(f"{names[int(side[op])]} of {model.blocks[owner[op]].path}")
            else:
                labels.append({"optimizer": "optimizer step"}.get(phases[op], phases[op]))
        return np.asarray(bounds, dtype=np.intp), labels, owners

    def _column(self, b: int, treatment: Treatment, gone: Sequence[Life], come: Sequence[Life]) -> Int64s:
        model, bounds, owners = self._model, self._stretches[0], self._stretches[2]
        num_ops = len(model.step.ops)
        change = np.zeros(num_ops + 1, dtype=np.int64)
        for lives, sign in ((gone, -1), (come, 1)):
            for life in lives:
                if not self._is_here(model.step.storages[life.origin].device):
                    continue
                begin = max(life.begin[0], 0)  # a life begun while recomputing before t is there at t
                end = min(life.end[0], num_ops)
                if begin < end:
                    change[begin] += sign * life.nbytes
                    change[end] -= sign * life.nbytes
        delta = np.cumsum(change[:-1])
        column = np.maximum.reduceat(delta, bounds)
        own = np.maximum.reduceat(self._curve + delta, bounds) - self._base_peaks
        own_rows = np.asarray(owners) == b
        column[own_rows] = own[own_rows]
        changed = _Lives(gone, come)
        for call, saved in zip(model.blocks[b].calls, model.blocks[b].saved, strict=True):
            for at, ops in model.repeated_ops(call, saved, treatment) if call.backward_start >= 0 else ():
                row = int(np.searchsorted(bounds, at, side="right")) - 1
                peak = int(self._before[at]) + changed.repeated_peak(at, len(ops))
                column[row] = max(int(column[row]), peak - int(self._base_peaks[row]))
        return column


class _Lives:
    """Holds what a treatment changes, in columns: a recurrent block is called, and looked at, hundreds of times."""

    def __init__(self, gone: Sequence[Life], come: Sequence[Life]) -> None:
        lives = [*gone, *come]
        self._begin = np.asarray([life.begin for life in lives], dtype=np.int64).reshape(-1, 2)
        self._end = np.asarray([life.end for life in lives], dtype=np.int64).reshape(-1, 2)
        signs = np.repeat((-1, 1), (len(gone), len(come)))
        self._bytes = signs * np.asarray([life.nbytes for life in lives], dtype=np.int64)

    def repeated_peak(self, at: int, num_ops: int) -> int:
        """Returns the highest bytes, relative to the plain step at `at`, while operations run again before it."""
        begins_here, ends_here = self._begin[:, 0] == at, self._end[:, 0] == at
        has_begun = (self._begin[:, 0] < at) | (begins_here & (self._begin[:, 1] < LAST))
        has_not_ended = (self._end[:, 0] > at) | (ends_here & (self._end[:, 1] > 0))
        there = has_begun & has_not_ended
        begin = np.where(begins_here, self._begin[:, 1], 0)[there]
        end = np.where(ends_here, self._end[:, 1], num_ops + 1)[there]
        change = np.zeros(num_ops + 2, dtype=np.int64)
        np.add.at(change, begin, self._bytes[there])
        np.subtract.at(change, end, self._bytes[there])
        return int(np.cumsum(change[:-1]).max())
