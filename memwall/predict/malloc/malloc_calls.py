"""A recorded step as calls to malloc: what `malloc_replay.replay` replays."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from memwall.predict.malloc.malloc_process import ALLOCATE, ALLOCATE_SMALL, FREE, MOVE, STEP
from memwall.trace.records import Step

# What lives beside a storage: its header and its tensor's (c10/core/StorageImpl.h, TensorImpl.h), and small change. The
# blocks of 24 bytes matter most: they fit the slivers that glibc cuts off an aligned block, and keep gaps open there.
# Sizes and numbers here and below: calls of a GPT, a convolutional net and a perceptron with torch 2.13, recorded by a
# malloc interposer.
_HEADER_BYTES = (24, 104, 184, 24)
# What a forward operation leaves behind until its backward ran: the autograd node and what it holds.
_NODE_BYTES = (24, 24, 472, 24, 24, 72)

_Block = tuple[int, tuple[int, ...]]
"""Bytes of a storage, and its slots: its own and its headers'."""


class StepEvents:
    """Holds the calls of one step as flat (kind, slot, nbytes) triples, and what stands before and after it."""

    def __init__(self) -> None:
        self.events = array("q")
        self.before: list[_Block] = []
        self.after: list[_Block] = []
        self.num_slots = 0

    def allocate(self, kind: int, nbytes: int) -> int:
        """Adds an allocation and returns its slot."""
        self.events.extend((kind, self.num_slots, nbytes))
        self.num_slots += 1
        return self.num_slots - 1

    def allocate_small(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Adds allocations of tensor headers or graph nodes and returns their slots."""
        slots = tuple(range(self.num_slots, self.num_slots + len(sizes)))
        calls = [ALLOCATE_SMALL] * (3 * len(sizes))
        calls[1::3], calls[2::3] = slots, sizes
        self.events.fromlist(calls)
        self.num_slots += len(sizes)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Adds the frees of these slots."""
        calls = [FREE, 0, 0] * len(slots)
        calls[1::3] = slots
        self.events.fromlist(calls)


def events_of(step: Step, *, has_small_blocks: bool = True) -> StepEvents:
    """Returns the calls to malloc that one step makes.

    At each operation first the storages that died before it are freed, then its own are allocated.

    Args:
        has_small_blocks: whether tensor headers and graph nodes are imitated.
    """
    num_ops = len(step.ops)
    out = StepEvents()
    blocks: dict[int, _Block] = {}
    births: defaultdict[int, list[int]] = defaultdict(list)
    deaths: defaultdict[int, list[int]] = defaultdict(list)
    num_headers = len(_HEADER_BYTES) if has_small_blocks else 0
    for index, storage in enumerate(step.storages):
        if storage.device != "cpu" or storage.nbytes <= 0 or storage.death <= storage.birth:
            continue
        deaths[min(storage.death, num_ops + 1)].append(index)
        if storage.birth >= 0:
            births[storage.birth].append(index)
        else:
            slots = tuple(range(out.num_slots, out.num_slots + 1 + num_headers))
            blocks[index] = (storage.nbytes, slots)
            out.before.append(blocks[index])
            out.num_slots += len(slots)
    node_dies = _node_deaths(step) if has_small_blocks else {}
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for op in range(num_ops + 1):
        for index in deaths[op] if op < num_ops else []:
            out.free(blocks.pop(index)[1])
        out.free(nodes.pop(op, []))
        if op == num_ops:
            for rest in nodes.values():
                out.free(rest)
        for index in births[op]:
            nbytes = step.storages[index].nbytes
            data = out.allocate(ALLOCATE, nbytes)
            blocks[index] = (nbytes, (data, *out.allocate_small(_HEADER_BYTES[:num_headers])))
        if op in node_dies and births[op]:
            nodes[node_dies[op]] += out.allocate_small(_NODE_BYTES)
    out.after = list(blocks.values())
    return out


def repeated(step: StepEvents, num_steps: int) -> array[int]:
    """Returns one sequence of calls: what stands before the first step, and the step so many times.

    What outlives a step is what stands before the next, matched by size: a gradient that lives until it is zeroed takes
    its predecessor's place. What the next step does not know is freed, what it misses is allocated.
    """
    events: array[int] = array("q")
    wanted = {slots: nbytes for nbytes, slots in step.before}
    _link(events, {}, wanted)
    for number in range(num_steps):
        events.extend((STEP, 0, 0))
        if number > 0:
            _link(events, {slots: nbytes for nbytes, slots in step.after}, wanted)
        events.extend(step.events)
    return events


def _link(events: array[int], standing: dict[tuple[int, ...], int], wanted: dict[tuple[int, ...], int]) -> None:
    """Puts what stands into the slots of what is wanted; the same slots first, then by size."""
    spare: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    for slots, nbytes in standing.items():
        if slots not in wanted:
            spare[nbytes, len(slots)].append(slots)
    for slots, nbytes in wanted.items():
        if slots in standing:
            continue
        found = spare[nbytes, len(slots)]
        if found:
            for target, source in zip(slots, found.pop(0), strict=True):
                events.extend((MOVE, target, source))
        else:
            events.extend((ALLOCATE, slots[0], nbytes))
            for slot, size in zip(slots[1:], _HEADER_BYTES, strict=False):
                events.extend((ALLOCATE_SMALL, slot, size))
    for unknown in spare.values():
        for slots in unknown:
            for slot in slots:
                events.extend((FREE, slot, 0))


def _node_deaths(step: Step) -> dict[int, int]:
    """Returns when graph nodes of each forward operation go: spread over the backward that follows, last ones first."""
    dies: dict[int, int] = {}
    pending: list[int] = []
    for is_backward, numbers in groupby(
        (n for n, op in enumerate(step.ops) if op.phase in ("forward", "loss", "backward")),
        key=lambda n: step.ops[n].phase == "backward",
    ):
        ops = list(numbers)
        if not is_backward:
            pending += ops
            continue
        for place, born in enumerate(reversed(pending), start=1):
            dies[born] = ops[0] + place * (ops[-1] + 1 - ops[0]) // len(pending)
        pending = []
    return dies
