"""The menu of each block, and the memory rows: from a step to the instance the solvers work on."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from memwall.planning.legality import can_rebuild, can_recompute
from memwall.planning.solver.instance import Block, Instance, Link, Option, Row
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.curve import live_curve
from memwall.predict.lives import LAST, Life
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace

__all__ = ["Costs", "Menu", "build_instance", "build_menus"]

Int64s = NDArray[np.int64]

# What the executor itself costs, measured on two cores with torch 2.13 (benchmarks/executor_cost.py, 2026-11-20, the
# last two 2026-11-22).
_CHECKPOINT_SECONDS = 650e-6  # one torch checkpoint of a block: frame, RNG state, hooks
_SELECT_SECONDS_PER_OP = 40e-6  # one operation under selective checkpointing, forward and recomputation together
_HANDLE_SECONDS = 4e-6  # one saved tensor that passes through the hooks of recompute handles, there and back
_REBUILD_SECONDS = 47e-6  # one result that becomes a recipe and is rebuilt, besides the operation itself
# What the host is busy with for one operation of a device that works behind it: assumed, not measured, and rather too
# much. The larger it is, the sooner a block counts as one whose device waits for Python.
_LAUNCH_SECONDS = 10e-6
# Selective points of a block: each makes the program slower to solve.
_MOST_POINTS = 6


class Costs(Struct, frozen=True, kw_only=True):
    """What moving bytes costs the computing thread, besides waiting for the link."""

    copy_seconds_per_byte: float
    """Out and back together: a copy into staging, or what transfers beside it cost, and page faults of what returns."""
    min_bytes: int
    """Tensors below this are not moved."""
    can_offload: bool
    pack_seconds_per_element: float | None = None
    """Of floating-point numbers that leave in a byte each, out and back together; None where they may not."""
    runs_ahead: bool = False
    """Whether operations run on a device behind the host, whose own work is hidden as long as the device is busy."""
    num_passes: int = 1
    """Times a step runs the recorded calls: micro-batches that each recompute and move anew. The seconds of operations
    are those of all passes together."""


class Menu(Struct, frozen=True, kw_only=True):
    """A block's options as the solver sees them, and as the executor applies them; same order."""

    block: BlockCalls
    options: tuple[Option, ...]
    treatments: tuple[Treatment | None, ...]
    op_names: tuple[str, ...]
    """Operations of one call, in the numbering that selective checkpointing uses."""
    freed_bytes: tuple[int, ...]
    """What each option takes off the device between the block's forward and its backward."""


def build_menus(
    trace: Trace, model: StepModel, costs: Costs, *, not_recomputed: Sequence[str] = ()
) -> tuple[Menu, ...]:
    """Per block: keep, full recompute, up to six selective points, results of fused kernels rebuilt, and with a tier
    below the moved variants; where numbers may leave packed, these too if they then move fewer bytes."""
    return tuple(
        _menu(
            model,
            block,
            costs,
            is_repeatable=block.path not in not_recomputed and can_recompute(trace, model, block) is None,
        )
        for block in model.blocks
    )


def _menu(model: StepModel, block: BlockCalls, costs: Costs, *, is_repeatable: bool) -> Menu:
    options = [Option(name="keep", extra_seconds=0.0, moved_bytes=0)]
    treatments: list[Treatment | None] = [None]

    def offer(name: str, treatment: Treatment, below_bytes: float = math.inf) -> int:
        seconds, moved_bytes = _price(model, block, treatment, costs)
        if not treatment.offload or 0 < moved_bytes < below_bytes:
            options.append(Option(name=name, extra_seconds=seconds, moved_bytes=moved_bytes))
            treatments.append(treatment)
        return moved_bytes

    if is_repeatable:
        offer("full", Treatment(recompute=True, min_bytes=costs.min_bytes))
        for number, kept in enumerate(_selective_points(model, block), start=1):
            offer(f"select-{number}", Treatment(recompute=True, kept_ops=kept, min_bytes=costs.min_bytes))
    is_rebuildable = can_rebuild(model, block) is None
    if is_rebuildable:
        offer("rebuild", Treatment(rebuild=True, min_bytes=costs.min_bytes))
    if costs.can_offload:
        moving = [("offload", Treatment(offload=True, min_bytes=costs.min_bytes))]
        if is_rebuildable:
            moving.append(("rebuild+offload", Treatment(rebuild=True, offload=True, min_bytes=costs.min_bytes)))
        if is_repeatable:
            moving.append(("full+offload", Treatment(recompute=True, offload=True, min_bytes=costs.min_bytes)))
        for name, treatment in moving:
            moved_bytes = offer(name, treatment)
            # Run again from inputs that lost digits, a block may take another path, as routing to experts does.
            if costs.pack_seconds_per_element is not None and not treatment.recompute:
                offer(f"{name} as int8", msgspec.structs.replace(treatment, is_packed=True), moved_bytes)
    number = model.blocks.index(block)
    op_names = tuple(model.names[model.step.ops[op].name] for op in model.counted_ops(block.calls[0]))
    freed = tuple(0 if t is None else _freed_bytes(model, number, t) for t in treatments)
    return Menu(block=block, options=tuple(options), treatments=tuple(treatments), op_names=op_names, freed_bytes=freed)


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
        python_seconds = 0.0
        if treatment.recompute:
            python_seconds += _CHECKPOINT_SECONDS
            if treatment.kept_ops:
                python_seconds += _SELECT_SECONDS_PER_OP * len(model.counted_ops(call))
        if treatment.rebuild:
            python_seconds += _HANDLE_SECONDS * len(saved) + _REBUILD_SECONDS * len(again)
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
    """What is left of the host's further work where it launches a block's operations while the device runs them."""
    return max(0.0, launch_seconds + python_seconds - device_seconds) - max(0.0, launch_seconds - device_seconds)


def _selective_points(model: StepModel, block: BlockCalls) -> list[tuple[int, ...]]:
    """Sets of operations whose results are worth keeping: the front of seconds saved per byte kept.

    Candidates make new storages that nobody writes to later; views and in-place operations always run again. A random
    operation that is kept draws nothing when the others run again, so none may come after it.
    """
    step, call, saved = model.step, block.calls[0], block.saved[0]
    again = set(model.recomputed_ops(call, saved, Treatment(recompute=True)))
    last_random = max((op for op in again if _is_random(model.names[step.ops[op].name])), default=-1)
    candidates: list[tuple[float, int, int, float]] = []
    total_seconds = 0.0
    for number, op in enumerate(model.counted_ops(call)):
        if op not in again:
            continue
        record = step.ops[op]
        total_seconds += record.seconds
        fresh = [i for i in record.outputs if step.storages[i].birth == op]
        if not fresh or len(fresh) != len(record.outputs) or record.writes:
            continue
        if any(model.is_written(i, op + 1, call.backward_start) for i in fresh):
            continue
        if op < last_random and _is_random(model.names[record.name]):
            continue
        num_bytes = sum(step.storages[i].nbytes for i in fresh)
        if num_bytes > 0 and record.seconds > 0:
            candidates.append((-record.seconds / num_bytes, number, num_bytes, record.seconds))
    candidates.sort()
    kept_in_full = sum(step.storages[i].nbytes for i in {step.saved[s].storage for s in saved})
    points: list[tuple[int, ...]] = []
    chosen: list[int] = []
    num_bytes, seconds, next_seconds, next_bytes = 0, 0.0, 0.15 * total_seconds, 0.17 * kept_in_full
    for _, number, size, gain in candidates:
        num_bytes += size
        seconds += gain
        chosen.append(number)
        if num_bytes >= kept_in_full:
            break
        # By seconds and by bytes: where one operation takes most of the time, the bytes still come in parts.
        if (seconds >= next_seconds or num_bytes >= next_bytes) and len(points) < _MOST_POINTS:
            points.append(tuple(sorted(chosen)))
            next_seconds, next_bytes = seconds + 0.17 * total_seconds, num_bytes + 0.17 * kept_in_full
    return points


@cache
def _is_random(name: str) -> bool:
    """Whether an operator draws random numbers; one that is unknown here may."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    tags = getattr(operator, "tags", None)
    return tags is None or torch.Tag.nondeterministic_seeded in tags


def build_instance(
    model: StepModel, menus: Sequence[Menu], *, budget_bytes: int, device: str, link: Link | None
) -> Instance:
    """Memory rows at every block of forward, at the loss, at every block of backward and around them.

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
        Block(
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
    """Consecutive stretches of the step: where each begins, what it is called, and the block it belongs to or -1."""
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
    """What one option of one block adds to each row."""
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
    for call, saved in zip(model.blocks[b].calls, model.blocks[b].saved, strict=True):
        for at, ops in model.repeated_ops(call, saved, treatment) if call.backward_start >= 0 else ():
            row = int(np.searchsorted(bounds, at, side="right")) - 1
            peak = int(before[at]) + _repeated_peak(gone, come, at, len(ops))
            column[row] = max(int(column[row]), peak - int(base_peaks[row]))
    return column


def _repeated_peak(gone: Sequence[Life], come: Sequence[Life], at: int, num_ops: int) -> int:
    """Highest bytes, relative to the plain step at operation `at`, while operations run again before it."""
    change = np.zeros(num_ops + 2, dtype=np.int64)
    for lives, sign in ((gone, -1), (come, 1)):
        for life in lives:
            if life.begin >= (at, LAST) or life.end <= (at, 0):
                continue
            begin = life.begin[1] if life.begin[0] == at else 0
            end = life.end[1] if life.end[0] == at else num_ops + 1
            change[begin] += sign * life.nbytes
            change[end] -= sign * life.nbytes
    return int(np.cumsum(change[:-1]).max())
