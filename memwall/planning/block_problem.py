"""The menu of each block and the memory rows: from a step to the instance that solvers work on, and back to actions."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memwall.planning.action import Action
from memwall.planning.link_waits import OnTheWay, hidden_bytes, leaving, passing, piece_bytes
from memwall.planning.menu import WINDOW_BYTES, Costs, Menu
from memwall.planning.one_recording.step_rows import StepRows
from memwall.planning.solver.instance import BlockOptions, Choice, Instance, Leaving, Link, Option, Row
from memwall.planning.technique import techniques
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace

Int64s = NDArray[np.int64]

# What the host is busy with for one operation of a device that works behind it, where that is not measured: rather too
# much. The larger it is, the sooner a block counts as one whose device waits for Python.
_LAUNCH_SECONDS = 10e-6


def build_menus(trace: Trace, model: StepModel, costs: Costs, rows: StepRows | None = None) -> tuple[Menu, ...]:
    """Returns the menu of each block: keeping everything, and what techniques offer for it.

    Args:
        rows: those of the model, where they are known already.
    """
    rows = rows or StepRows(model, trace.device)
    pieces = () if costs.link is None else _pieces(model, costs.min_bytes, costs.link)
    granule_bytes = max(pieces, default=0)
    return tuple(_menu(trace, model, block, costs, rows, granule_bytes) for block in model.blocks)


def _pieces(model: StepModel, min_bytes: int, link: Link) -> Iterator[int]:
    """Yields in what pieces the tensors of blocks may leave."""
    anywhere = Treatment(offload=True, min_bytes=min_bytes)
    for block in model.blocks:
        for call, saved in zip(block.calls, block.saved, strict=True):
            yield from (piece_bytes(part.link_bytes, link) for part in model.moved(call, saved, anywhere).values())


def _menu(trace: Trace, model: StepModel, block: BlockCalls, costs: Costs, rows: StepRows, granule_bytes: int) -> Menu:
    options = [Option(name="keep", extra_seconds=0.0, moved_bytes=0)]
    treatments: list[Treatment | None] = [None]
    moved: dict[str, int] = {}
    for technique in techniques():
        if (technique.tag, block.path) in costs.lost:
            continue
        for name, treatment, than in technique.block_options(trace, model, block, costs, tuple(moved)):
            option = _priced(name, model, block, treatment, costs, granule_bytes)
            moved[name] = option.moved_bytes
            most_bytes = moved.get(than, math.inf)
            if not treatment.offload or 0 < moved[name] < most_bytes:
                options.append(option)
                treatments.append(treatment)
    number = model.blocks.index(block)
    op_names = tuple(model.names[model.step.ops[op].name] for op in model.counted_ops(block.calls[block.first_trained]))
    freed = tuple(0 if t is None else rows.freed_bytes(number, t) for t in treatments)
    return Menu(
        block=block,
        options=tuple(options),
        treatments=tuple(treatments),
        op_names=op_names,
        freed_bytes=freed,
        window_bytes=costs.link.window_bytes if costs.link is not None else WINDOW_BYTES,
    )


def _priced(
    name: str, model: StepModel, block: BlockCalls, treatment: Treatment, costs: Costs, granule_bytes: int
) -> Option:
    seconds, begin_seconds, moved_bytes, beside_bytes, num_packed = 0.0, 0.0, 0, 0, 0
    parts: list[OnTheWay] = []
    step = model.step
    for call, saved in zip(block.calls, block.saved, strict=True):
        if call.backward_start < 0:
            continue
        repeated = model.repeated_ops(call, saved, treatment)
        again = [op for _, ops in repeated for op in ops]
        seconds += sum(step.ops[op].seconds for op in again)
        python_seconds = sum(one.host_seconds(model, call, saved, treatment) for one in techniques())
        python_seconds *= costs.num_passes
        if costs.runs_ahead:
            own = [*range(call.start, call.end), *range(call.backward_start, call.backward_end), *again]
            device_seconds = sum(step.ops[op].seconds for op in own)
            launch_seconds = (step.launch_seconds or _LAUNCH_SECONDS) * len(own) * costs.num_passes
            python_seconds = _not_hidden(python_seconds, device_seconds, launch_seconds)
        seconds += python_seconds
        if treatment.offload:
            moved = model.moved(call, saved, treatment)
            moved_bytes += sum(part.link_bytes for part in moved.values())
            num_packed += sum(part.num_packed for part in moved.values())
            if costs.link is not None:
                own_parts = passing(step, call, () if treatment.recompute else saved, moved)
                beside_bytes += hidden_bytes(own_parts, costs.link)
                parts += (part._replace(left_seconds=begin_seconds + part.left_seconds) for part in own_parts)
                begin_seconds += _seconds(model, call.start, call.end)
    moving_seconds = moved_bytes * costs.copy_seconds_per_byte + num_packed * (costs.pack_seconds_per_element or 0.0)
    return Option(
        name=name,
        extra_seconds=seconds + moving_seconds * costs.num_passes,
        moved_bytes=moved_bytes,
        hidden_bytes=beside_bytes,
        leaving=leaving(parts, costs.link, granule_bytes) if costs.link is not None else Leaving(),
    )


def _not_hidden(python_seconds: float, device_seconds: float, launch_seconds: float) -> float:
    """Returns the seconds of the host's further work that the device, which runs behind it, does not hide."""
    return max(0.0, launch_seconds + python_seconds - device_seconds) - max(0.0, launch_seconds - device_seconds)


def build_instance(
    model: StepModel,
    menus: Sequence[Menu],
    *,
    budget_bytes: int,
    device: str,
    link: Link | None,
    rows: StepRows | None = None,
) -> Instance:
    """Returns the instance of a step's memory rows; what their figures mean says `StepRows`.

    Args:
        rows: those of the model, where they are known already.
    """
    step_rows = rows or StepRows(model, device)
    columns = [
        [step_rows.nothing if treatment is None else step_rows.column(b, treatment) for treatment in menu.treatments]
        for b, menu in enumerate(menus)
    ]
    window_bytes = link.window_bytes if link is not None else 0
    held_in_rows = tuple(
        Row(
            label=label,
            fixed_bytes=fixed_bytes + window_bytes,
            held=tuple(tuple(int(column[r]) for column in options) for options in columns),
        )
        for r, (label, fixed_bytes) in enumerate(step_rows.named)
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
    return Instance(blocks=blocks, rows=held_in_rows, budget_bytes=budget_bytes, link=link)


def _seconds(model: StepModel, start: int, end: int) -> float:
    """Returns how long operations take; the host, where it issues them slower than the device does them."""
    return max(sum(op.seconds for op in model.step.ops[start:end]), model.step.launch_seconds * (end - start))


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
    moving: list[Action] = []
    for menu, number in zip(menus, choice.options, strict=True):
        for technique in techniques():
            action = technique.block_action(menu, number, device)
            if action is not None:
                (moving if technique.uses_tier else staying).append(action)
    return staying + moving
