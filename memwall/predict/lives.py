"""A step put together anew from lives of storages, with operations inserted into it.

Times are pairs (operation, position): `(t, LAST)` is operation t itself, `(t, r)` the r-th operation recomputed
before it; so they sort as they run. What the trace says to end before operation t ends at `(t, 0)`: a recomputation
begins when backward asks for a block's first tensor, and by then the operations before have let go of theirs.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from memwall.trace.records import SavedTensor, Step, Storage

LAST = 1 << 40
Time = tuple[int, int]


class Life(NamedTuple):
    """Describes one stay in memory of a storage, or of a copy of it."""

    origin: int
    nbytes: int
    begin: Time
    end: Time


def rebuilt(step: Step, insertions: Sequence[tuple[int, list[int]]], lives: Sequence[Life]) -> Step:
    """Renumbers a step's time after inserting operations before others."""
    place = _places(len(step.ops), insertions)
    storages = []
    for life in lives:
        origin = step.storages[life.origin]
        death = place(life.end)
        storages.append(
            Storage(
                nbytes=life.nbytes,
                device=origin.device,
                category=origin.category,
                birth=place(life.begin),
                dropped=death,
                death=death,
                module=origin.module,
                phase=origin.phase if life.begin[1] == LAST else "backward",
                batched=origin.batched,
                line=origin.line,
                dtype=origin.dtype,
                stream=origin.stream,
            )
        )
    return _renumbered(step, insertions, place, storages)


def extended(step: Step, insertions: Sequence[tuple[int, list[int]]], lives: Sequence[Life]) -> Step:
    """Returns a step with operations inserted before others, its storages as they are, and further lives of some."""
    place = _places(len(step.ops), insertions)
    storages = [
        msgspec.structs.replace(
            storage,
            birth=place((storage.birth, LAST)),
            dropped=place((storage.dropped, 0)),
            death=place((storage.death, LAST if storage.death == storage.birth else 0)),
        )
        for storage in step.storages
    ]
    for life in lives:
        begin, end = place(life.begin), place(life.end)
        origin = step.storages[life.origin]
        again = msgspec.structs.replace(origin, nbytes=life.nbytes, birth=begin, dropped=end, death=end)
        storages.append(msgspec.structs.replace(again, phase="backward"))
    return _renumbered(step, insertions, place, storages)


def _places(num_ops: int, insertions: Sequence[tuple[int, list[int]]]) -> Callable[[Time], int]:
    moved_to = _moved_to(num_ops, insertions)

    def place(time: Time) -> int:
        op, position = time
        if op < 0:
            return -1
        if op >= num_ops:
            return op + moved_to[-1] - num_ops - 1 + (0 if position == LAST else position)
        return moved_to[op + 1] - 1 if position == LAST else moved_to[op] + position

    return place


def _renumbered(
    step: Step,
    insertions: Sequence[tuple[int, list[int]]],
    place: Callable[[Time], int],
    storages: Sequence[Storage],
) -> Step:
    new_ops = []
    inserted: dict[int, list[int]] = {}
    for op, ops in insertions:
        inserted.setdefault(op, []).extend(ops)
    for op, record in enumerate(step.ops):
        for again in inserted.get(op, ()):
            original = step.ops[again]
            new_ops.append(msgspec.structs.replace(original, phase="backward", inputs=(), outputs=(), writes=()))
        new_ops.append(record)
    saved = tuple(
        SavedTensor(
            storage=save.storage,
            module=save.module,
            nbytes=save.nbytes,
            packed=place((save.packed, LAST)),
            unpacked=place((save.unpacked, LAST)),
            released=place((save.released, LAST)),
        )
        for save in step.saved
    )
    calls = tuple(
        msgspec.structs.replace(
            call,
            start=place((call.start, LAST)),
            end=place((call.end, LAST)),
            backward_start=place((call.backward_start, 0)) if call.backward_start >= 0 else -1,
            backward_end=place((call.backward_end, LAST)) if call.backward_end >= 0 else -1,
        )
        for call in step.calls
    )
    marks = tuple((name, place((op, LAST))) for name, op in step.marks)
    return msgspec.structs.replace(
        step, ops=tuple(new_ops), storages=tuple(storages), saved=saved, calls=calls, marks=marks, process_peak_bytes=0
    )


def _moved_to(num_ops: int, insertions: Sequence[tuple[int, list[int]]]) -> list[int]:
    """Returns where what runs before each operation, and before the end, begins: that many operations precede it."""
    added = [0] * (num_ops + 2)
    for op, ops in insertions:
        added[op + 1] += len(ops)
    return [op + shift for op, shift in enumerate(accumulate(added))]
