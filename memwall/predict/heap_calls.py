"""A recorded step as calls to an allocator: what `tensor_heap.replay_in_heap` replays."""

from array import array
from collections import defaultdict
from collections.abc import Sequence

from memwall.trace.records import Step

ALLOCATE = 0
FREE = 1
STEP = 2
"""A new step begins: figures are kept per step."""
MOVE = 3
"""The block of the slot in the third number is now known by the slot in the second."""


class StepEvents:
    """Holds the calls of one step as flat (kind, slot, nbytes) triples, and what stands before and after it."""

    def __init__(self) -> None:
        self.events = array("q")
        self.before: dict[int, int] = {}
        """Bytes of each slot."""
        self.after: dict[int, int] = {}
        self.num_slots = 0

    def allocate(self, nbytes: int) -> int:
        """Adds an allocation and returns its slot."""
        self.events.extend((ALLOCATE, self.num_slots, nbytes))
        self.num_slots += 1
        return self.num_slots - 1

    def free(self, slots: Sequence[int]) -> None:
        """Adds the frees of these slots."""
        calls = [FREE, 0, 0] * len(slots)
        calls[1::3] = slots
        self.events.fromlist(calls)


def events_of(step: Step) -> StepEvents:
    """Returns the calls that the tensors of one step make.

    At each operation first the storages that died before it are freed, then its own are allocated.
    """
    num_ops = len(step.ops)
    out = StepEvents()
    slots: dict[int, int] = {}
    births: defaultdict[int, list[int]] = defaultdict(list)
    deaths: defaultdict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(step.storages):
        if storage.device != "cpu" or storage.nbytes <= 0 or storage.death <= storage.birth:
            continue
        deaths[min(storage.death, num_ops + 1)].append(index)
        if storage.birth >= 0:
            births[storage.birth].append(index)
        else:
            slots[index] = out.num_slots
            out.before[out.num_slots] = storage.nbytes
            out.num_slots += 1
    for op in range(num_ops + 1):
        if op < num_ops:
            out.free([slots.pop(index) for index in deaths[op]])
        for index in births[op]:
            slots[index] = out.allocate(step.storages[index].nbytes)
    out.after = {slot: step.storages[index].nbytes for index, slot in slots.items()}
    return out


def repeated(step: StepEvents, num_steps: int) -> "array[int]":
    """Returns one sequence of calls: what stands before the first step, and the step so many times.

    What outlives a step is what stands before the next, matched by size: a gradient that lives until it is zeroed takes
    its predecessor's place. What the next step does not know is freed, what it misses is allocated.
    """
    events: array[int] = array("q")
    _link(events, {}, step.before)
    for number in range(num_steps):
        events.extend((STEP, 0, 0))
        if number > 0:
            _link(events, step.after, step.before)
        events.extend(step.events)
    return events


def _link(events: "array[int]", standing: dict[int, int], wanted: dict[int, int]) -> None:
    """Puts what stands into the slots of what is wanted; the same slots first, then by size."""
    spare: defaultdict[int, list[int]] = defaultdict(list)
    for slot, nbytes in standing.items():
        if slot not in wanted:
            spare[nbytes].append(slot)
    for slot, nbytes in wanted.items():
        if slot in standing:
            continue
        if spare[nbytes]:
            events.extend((MOVE, slot, spare[nbytes].pop(0)))
        else:
            events.extend((ALLOCATE, slot, nbytes))
    for unknown in spare.values():
        for slot in unknown:
            events.extend((FREE, slot, 0))
