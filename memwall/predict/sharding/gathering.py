"""A recorded step of FSDP2 whose units free after forward what they have gathered, where they kept it as recorded.

Torch 2.13 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `pre_backward`, `_backward_prefetch`) gathers it
again where a unit's backward begins, unless the unit before it in backward has begun that already. What a gather runs
and holds is taken from that of the unit's forward.
"""

from bisect import bisect_left
from collections.abc import Collection
from functools import cached_property
from statistics import median
from typing import NamedTuple

import msgspec

from memwall.predict.lives import Life, extended
from memwall.trace.records import ModuleCall, Step, Trace

_COLLECTIVES = ("c10d.", "_c10d_functional.")


class GatheredUnit(NamedTuple):
    """Describes a unit that stays gathered from its forward to its backward."""

    path: str
    call: ModuleCall
    whole: tuple[int, ...]
    """Storages of its gathered parameters."""
    gather: tuple[int, ...]
    """Operations that gather them into a buffer, in the order in which they ran."""
    copy: int
    """The operation that copies them out of it."""
    num_bytes: int


class Gathering:
    """Finds in a step which units stay gathered, and what else they could do.

    Args:
        trace: of which the step is.
        step: recorded, or made of a recorded one with operations in their places.
    """

    def __init__(self, trace: Trace, step: Step) -> None:
        self._trace, self._step = trace, step
        self._whole: dict[int, list[int]] = {}
        for index, storage in enumerate(step.storages):
            if storage.unit >= 0:
                self._whole.setdefault(storage.unit, []).append(index)
        self._order: list[ModuleCall] = []
        """Calls of units in the order in which they end."""
        if self._whole:
            own = (call for call in step.calls if call.module in self._whole and self._is_forward(call))
            self._order = sorted(own, key=lambda call: (call.end, -call.start))

    def _is_forward(self, call: ModuleCall) -> bool:
        """Tells whether a call is none of a recomputation within backward."""
        return call.start < len(self._step.ops) and self._step.ops[call.start].phase != "backward"

    @cached_property
    def kept(self) -> tuple[GatheredUnit, ...]:
        """Returns the units that could free and gather again what they keep now, one for each call, by forward.

        Those are left out of which one call could not: where it gathers for several calls, or nothing else runs between
        its forward and its backward.
        """
        found = {call: self._unit(number, call) for number, call in enumerate(self._order)}
        fixed = {call.module for call, unit in found.items() if unit is None}
        return tuple(unit for call, unit in found.items() if unit is not None and call.module not in fixed)

    def _unit(self, number: int, call: ModuleCall) -> GatheredUnit | None:
        step, others = self._step, [c for c in self._order if c.module == call.module and c is not call]
        after = self._order[number + 1] if number + 1 < len(self._order) else None
        if after is None or after.end > call.backward_start:
            return None
        whole = tuple(
            index
            for index in self._whole[call.module]
            if 0 <= step.storages[index].birth < call.end <= call.backward_start < step.storages[index].death
        )
        begin = min((step.storages[index].birth for index in whole), default=0)
        end = max((step.storages[index].death for index in whole), default=0)
        writing = [k for k in range(begin, call.start) if not set(whole).isdisjoint(step.ops[k].writes)]
        if not whole or not writing or any(begin <= other.end and other.start < end for other in others):
            return None
        copy = writing[-1]
        buffers = {i for i in step.ops[copy].inputs if i not in whole and 0 <= step.storages[i].birth < copy}
        touching = [
            k
            for k in range(min((step.storages[i].birth for i in buffers), default=copy), copy)
            if not buffers.isdisjoint((*step.ops[k].inputs, *step.ops[k].outputs))
        ]
        names = self._trace.names
        meets = [k for k in touching if names[step.ops[k].name].startswith(_COLLECTIVES)]
        if not meets:
            return None
        gather = {k for k in touching if k <= meets[-1]}
        # What is cast before it is gathered is made before the buffer is.
        read = (step.storages[i] for k in gather for i in step.ops[k].inputs)
        gather |= {storage.birth for storage in read if storage.birth >= 0 and storage.category == "temporary"}
        path = self._trace.modules[call.module].path
        return GatheredUnit(
            path, call, whole, tuple(sorted(gather)), copy, sum(step.storages[index].nbytes for index in whole)
        )

    def seconds(self, unit: GatheredUnit) -> float:
        """Returns what gathering a unit once more takes; what one rank waits for another in one of them counts less."""
        return unit.num_bytes * self._seconds_per_byte

    @cached_property
    def _seconds_per_byte(self) -> float:
        ops = self._step.ops
        return median(sum(ops[k].seconds for k in (*unit.gather, unit.copy)) / unit.num_bytes for unit in self.kept)

    def freed(self, paths: Collection[str]) -> Step:
        """Returns the step with these of the kept units freed after forward and gathered again."""
        units = {unit.call: unit for unit in self.kept if unit.path in paths}
        storages, lives = list(self._step.storages), list[Life]()
        inserted: dict[int, list[int]] = {}
        begun: dict[ModuleCall, list[Life]] = {}
        """Buffers of units whose gathers have begun, until they are copied out of."""
        for number, call in reversed(list(enumerate(self._order))):
            at = call.backward_start
            if at < 0:
                continue
            unit, earlier = units.get(call), units.get(self._order[number - 1]) if number else None
            ops = inserted.setdefault(at, [])
            if unit is not None:
                buffers = begun.pop(call, None) or self._gathered_again(unit, at, ops, lives)
                copied = (at, len(ops))
                ops.append(unit.copy)
                lives.extend(life._replace(end=(at, len(ops))) for life in buffers)
                for index in unit.whole:
                    storage, end = storages[index], min(call.end + 1, at)
                    lives.append(Life(index, storage.nbytes, copied, (storage.death, 0)))
                    storages[index] = msgspec.structs.replace(storage, dropped=end, death=end)
            if earlier is not None:
                begun[earlier.call] = self._gathered_again(earlier, at, ops, lives)
        step = msgspec.structs.replace(self._step, storages=tuple(storages))
        return extended(step, sorted((at, ops) for at, ops in inserted.items() if ops), lives)

    def _gathered_again(self, unit: GatheredUnit, at: int, ops: list[int], lives: list[Life]) -> list[Life]:
        """Adds a gather to what is run before an operation, and what is gone after it to lives; returns its buffers."""
        begin, buffers = len(ops), list[Life]()
        for position, k in enumerate(unit.gather):
            for index in self._born.get(k, ()):
                storage = self._step.storages[index]
                life = Life(index, storage.nbytes, (at, begin + position), (at, 0))
                if storage.death > unit.copy:
                    buffers.append(life)
                else:
                    end = begin + bisect_left(unit.gather, storage.death)
                    lives.append(life._replace(end=(at, end)))
        ops.extend(unit.gather)
        return buffers

    @cached_property
    def _born(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, storage in enumerate(self._step.storages):
            if storage.unit < 0:
                found.setdefault(storage.birth, []).append(index)
        return found
