"""The menu of each block and the memory rows: from a step to the instance that solvers work on, and back to actions."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memwall.planning.action import Action
from memwall.planning.menu import Costs, Menu
from memwall.planning.solver.instance import BlockOptions, Choice, Instance, Link, Option, Row
from memwall.planning.technique import techniques
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.curve import live_curve
from memwall.predict.lives import LAST, Life
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace

__all__ = ["block_actions", "build_instance", "build_menus", "treatments_of_choice", "window_bytes_of"]

Int64s = NDArray[np.int64]

# What the host is busy with for one operation of a device that works behind it: assumed, not measured, and rather too
# much. The larger it is, the sooner a block counts as one whose device waits for Python.
_LAUNCH_SECONDS = 10e-6


def build_menus(trace: Trace, model: StepModel, costs: Costs) -> tuple[Menu, ...]:
    """Returns the menu of each block: keeping everything, and what techniques offer for it."""
    return tuple(_menu(trace, model, block, costs) for block in model.blocks)


def _menu(trace: Trace, model: StepModel, block: BlockCalls, costs: Costs) -> Menu:
    options = [Option(name="keep", extra_seconds=0.0, moved_bytes=0)]
    treatments: list[Treatment | None] = [None]
    moved: dict[str, int] = {}
    for technique in techniques():
        if (technique.tag, block.path) in costs.lost:
            continue
        for name, treatment, than in technique.block_options(trace, model, block, costs, tuple(moved)):
            seconds, moved[name] = _price(model, block, treatment, costs)
            most_bytes = moved.get(than, math.inf)
            if not treatment.offload or 0 < moved[name] < most_bytes:
                options.append(Option(name=name, extra_seconds=seconds, moved_bytes=moved[name]))
                treatments.append(treatment)
    number = model.blocks.index(block)
    op_names = tuple(model.names[model.step.ops[op].name] for op in model.counted_ops(block.calls[0]))
    freed = tuple(0 if t is None else _freed_bytes(model, number, t) for t in treatments)
    return Menu(
        block=block,
        options=tuple(options),
        treatments=tuple(treatments),
        op_names=op_names,
        freed_bytes=freed,
        window_bytes=costs.window_bytes,
    )


def _freed_bytes(model: StepModel, number: int, treatment: Treatment) -> int:
    call = next(call for call in model.blocks[number].calls if call.backward_start >= 0)
    between = (call.end, LAST + 1)
    gone, come = model.changed_lives(number, treatment)
    held = [sum(life.nbytes for life in lives if life.begin < between < life.end) for lives in (gone, come)]
    return held[0] - held[1]


def _price(model: StepModel, block: BlockCalls, treatment: Treatment, costs: Costs) -> tuple[float, int]:
    seconds, link_bytes, num_packed = 0.0, 0, 0
    step = model.step
    for call, saved in zip(block.calls, block.saved, strict=True):
        if call.backward_start < 0:
            continue
        repeated = model.repeated_ops(call, saved, treatment)
        again = [op for _, ops in repeated for op in ops]
        seconds += sum(step.ops[op].seconds for op in again)
        python_seconds = sum(one.host_seconds(model, call, saved, treatment, len(again)) for one in techniques())
        python_seconds *= costs.num_passes
        if costs.runs_ahead:
            own = [*range(call.start, call.end), *range(call.backward_start, call.backward_end), *again]
            device_seconds = sum(step.ops[op].seconds for op in own)
            python_seconds = _not_hidden(python_seconds, device_seconds, _LAUNCH_SECONDS * len(own) * costs.num_passes)
        seconds += python_seconds
        if treatment.offload:
            moved = model.moved(call, saved, treatment).values()
            link_bytes += sum(part.link_bytes for part in moved)
            num_packed += sum(part.num_packed for part in moved)
    moving_seconds = link_bytes * costs.copy_seconds_per_byte + num_packed * (costs.pack_seconds_per_element or 0.0)
    return seconds + moving_seconds * costs.num_passes, link_bytes


def _not_hidden(python_seconds: float, device_seconds: float, launch_seconds: float) -> float:
    """Returns the seconds of the host's further work that the device, which runs behind it, does not hide."""
    return max(0.0, launch_seconds + python_seconds - device_seconds) - max(0.0, launch_seconds - device_seconds)


def build_instance(
    model: StepModel, menus: Sequence[Menu], *, budget_bytes: int, device: str, link: Link | None
) -> Instance:
    """Returns memory rows at every block of forward, at the loss, at every block of backward and around them.

    A row covers a stretch of operations. Within a block's own stretch the highest point of step and option together
    counts; elsewhere what an option holds or frees there. Both are upper bounds of what options do together, but for
    one case: a checkpoint that holds a tensor which only another block saved (found: up to 2 % of the peak). The search
    therefore replays what it chose.
    """
    step = model.step
    curve = live_curve(step.storages, len(step.ops), device=device)
    # Live just before each operation: what it makes is not there yet.
    before = curve.copy()
    for storage in step.storages:
        if storage.birth >= 0 and storage.birth < storage.death and storage.device.partition(":")[0] == device:
            before[storage.birth] -= storage.nbytes
    bounds, labels, owners = _stretches(model)
    base_peaks = np.maximum.reduceat(curve, bounds)
    columns: list[list[Int64s]] = []
    for b, menu in enumerate(menus):
        options = []
        for treatment in menu.treatments:
            if treatment is None:
                options.append(np.zeros(len(bounds), dtype=np.int64))
            else:
                options.append(_column(model, b, treatment, curve, before, bounds, base_peaks, owners, device))
        columns.append(options)
    rows = tuple(
        Row(
            label=labels[r],
            fixed_bytes=int(base_peaks[r]) + (link.window_bytes if link is not None else 0),
            held=tuple(tuple(int(column[r]) for column in options) for options in columns),
        )
        for r in range(len(bounds))
    )
    blocks = tuple(
        BlockOptions(
            path=menu.block.path,
            options=menu.options,
            forward_seconds=sum(_seconds(model, call.start, call.end) for call in menu.block.calls),
            backward_seconds=sum(
                _seconds(model, call.backward_start, call.backward_end)
                for call in menu.block.calls
                if call.backward_start >= 0
            ),
        )
        for menu in menus
    )
    return Instance(blocks=blocks, rows=rows, budget_bytes=budget_bytes, link=link)


def _seconds(model: StepModel, start: int, end: int) -> float:
    return sum(op.seconds for op in model.step.ops[start:end])


def _stretches(model: StepModel) -> tuple[NDArray[np.intp], list[str], list[int]]:
    """Returns consecutive stretches of the step: where each begins, its name, and the block it belongs to or -1."""
    step = model.step
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


def _column(
    model: StepModel,
    b: int,
    treatment: Treatment,
    curve: Int64s,
    before: Int64s,
    bounds: NDArray[np.intp],
    base_peaks: Int64s,
    owners: Sequence[int],
    device: str,
) -> Int64s:
    """Returns the bytes that one option of one block adds to each row."""
    num_ops = len(model.step.ops)
    gone, come = model.changed_lives(b, treatment)
    change = np.zeros(num_ops + 1, dtype=np.int64)
    for lives, sign in ((gone, -1), (come, 1)):
        for life in lives:
            if model.step.storages[life.origin].device.partition(":")[0] != device:
                continue
            begin = max(life.begin[0], 0)  # a life begun while recomputing before t is there at t
            end = min(life.end[0], num_ops)
            if begin < end:
                change[begin] += sign * life.nbytes
                change[end] -= sign * life.nbytes
    delta = np.cumsum(change[:-1])
    column = np.maximum.reduceat(delta, bounds)
    own = np.maximum.reduceat(curve + delta, bounds) - base_peaks
    own_rows = np.asarray(owners) == b
    column[own_rows] = own[own_rows]
    changed = _Lives(gone, come)
    for call, saved in zip(model.blocks[b].calls, model.blocks[b].saved, strict=True):
        for at, ops in model.repeated_ops(call, saved, treatment) if call.backward_start >= 0 else ():
            row = int(np.searchsorted(bounds, at, side="right")) - 1
            peak = int(before[at]) + changed.repeated_peak(at, len(ops))
            column[row] = max(int(column[row]), peak - int(base_peaks[row]))
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


def window_bytes_of(menus: Sequence[Menu], choice: Choice) -> int:
    """Returns the memory that a choice needs for bytes on their way out: none if it moves nothing."""
    windows = (m.window_bytes for m, o in zip(menus, choice.options, strict=True) if m.options[o].moved_bytes)
    return max(windows, default=0)


def treatments_of_choice(menus: Sequence[Menu], choice: Choice) -> dict[str, Treatment]:
    """Returns block path -> treatment; blocks that keep everything are left out."""
    found: dict[str, Treatment] = {}
    for menu, option in zip(menus, choice.options, strict=True):
        treatment = menu.treatments[option]
        if treatment is not None:
            found[menu.block.path] = treatment
    return found


def block_actions(menus: Sequence[Menu], choice: Choice, device: str) -> list[Action]:
    """Returns the actions that carry out a choice: in block order, what runs again first, then what leaves."""
    staying: list[Action] = []
    leaving: list[Action] = []
    for menu, number in zip(menus, choice.options, strict=True):
        for technique in techniques():
            action = technique.block_action(menu, number, device)
            if action is not None:
                (leaving if technique.uses_tier else staying).append(action)
    return staying + leaving
