"""Finds what each operator allocates for itself, read from the CUDA allocator's own history while a step is recorded.

Formulas know what torch's source allocates (`workspaces.py`); the history has what closed libraries ask for, too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from memwall.predict.cuda.live_cuda import cuda_device_here
from memwall.predict.cuda.workspaces import CudaWorkspaces
from memwall.torch_internals.allocator import record_history, snapshot
from memwall.trace.records import Step, Storage
from memwall.trace.workspaces import Workspace

_CALLS = ("alloc", "free_completed")
Event = tuple[bool, int, int]
"""Whether a block is handed out or comes back, its address, and the bytes that were asked for."""


class OwnBlock(NamedTuple):
    """Holds a block that an operator asks for, in the order in which it does."""

    num_bytes: int
    is_freed: bool
    """Whether it comes back before the operator returns: no result, and nothing that a library keeps."""
    passes: bool = False
    """Whether it comes back before the operator asks for anything else, and something follows."""


class OwnBlocks(CudaWorkspaces):
    """Notes which part of the allocator's history each operator is, for `with_own_blocks`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(cuda_device_here(device))
        self._index = 0 if device.index is None else device.index
        record_history(enabled="all", context=None)
        self._begin, self._num_earlier = self._num_calls(), len(self._events())
        self._spans: list[tuple[int, int]] = []

    @contextmanager
    def measuring(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Workspace]:
        """Runs an operator between two places of the history."""
        del inputs, args, kwargs  # an operator that lets go of them while it runs needs less
        begin = self._num_calls()
        yield Workspace(())
        self._spans.append((begin - self._begin, self._num_calls() - self._begin))

    def take(self) -> list[tuple[OwnBlock, ...]]:
        """Returns the blocks of each operator that has run so far, in order."""
        events = self._events()[self._num_earlier :]
        return [own_blocks(events[begin:end]) for begin, end in self._spans]

    def _events(self) -> list[Event]:
        """Returns what was recorded so far, earlier recordings of the process included."""
        history = snapshot()["device_traces"][self._index]
        return [(one["action"] == "alloc", one["addr"], one["size"]) for one in history if one["action"] in _CALLS]

    def _num_calls(self) -> int:
        counts = torch.cuda.memory_stats_as_nested_dict(self._index)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])


def own_blocks(events: Sequence[Event]) -> tuple[OwnBlock, ...]:
    """Returns what an operator asks for. Of blocks that it frees and that overlap, those at its highest point.

    >>> own_blocks([(True, 1, 8), (True, 2, 64), (False, 2, 64), (True, 3, 32), (True, 4, 16), (False, 4, 16)])[1:]
    (OwnBlock(num_bytes=64, is_freed=True, passes=True), OwnBlock(num_bytes=32, is_freed=False, passes=False), \
OwnBlock(num_bytes=16, is_freed=True, passes=False))
    """
    last = max((place for place, (is_taken, _, _) in enumerate(events) if is_taken), default=-1)
    blocks: list[OwnBlock] = []
    number_at: dict[int, int] = {}
    live_bytes = peak_bytes = 0
    in_peak: frozenset[int] = frozenset()
    for place, (is_taken, address, num_bytes) in enumerate(events):
        if is_taken:
            passes = place < last and events[place + 1][:2] == (False, address)
            number_at[address] = len(blocks)
            blocks.append(OwnBlock(num_bytes, is_freed=False, passes=passes))
            live_bytes += 0 if passes else num_bytes
            if live_bytes > peak_bytes:
                peak_bytes, in_peak = live_bytes, frozenset(number_at.values())
        elif address in number_at:  # else it is an argument, of which the operator lets go
            number = number_at.pop(address)
            live_bytes -= 0 if blocks[number].passes else blocks[number].num_bytes
            blocks[number] = blocks[number]._replace(is_freed=True)
    return tuple(
        block for number, block in enumerate(blocks) if not block.is_freed or block.passes or number in in_peak
    )


def with_own_blocks(
    steps: Sequence[Step], blocks: Sequence[tuple[OwnBlock, ...]], device: torch.device
) -> tuple[Step, ...]:
    """Returns recorded steps with what their operators ask for beside their results, in the order in which they do.

    What an operator neither returns nor frees is a library's, which holds it through all later steps.

    Args:
        blocks: of all operators of all steps.
    """
    found: list[Step] = []
    held: list[Storage] = []
    at = 0
    for step in steps:
        made, kept = _with_blocks(step, blocks[at : at + len(step.ops)], str(device))
        end = len(step.ops)
        standing = (msgspec.structs.replace(each, birth=-1, dropped=end, death=end) for each in held)
        found.append(msgspec.structs.replace(made, storages=(*made.storages, *standing)))
        held += kept
        at += end
    return tuple(found)


def _with_blocks(step: Step, blocks: Sequence[tuple[OwnBlock, ...]], device: str) -> tuple[Step, list[Storage]]:
    """Returns the step with its operators' own blocks, and those of them that outlive it."""
    results: dict[int, list[int]] = {}
    for number, storage in enumerate(step.storages):
        results.setdefault(storage.birth, []).append(number)
    ahead_of: dict[int, list[Storage]] = {}
    """New storages by the one that they stand ahead of; the number of storages for the end."""
    held = []
    for at, asked in enumerate(blocks):
        pending, left = list(results.get(at, ())), Counter(step.storages[i].nbytes for i in results.get(at, ()))
        waiting: list[Storage] = []
        after = pending[-1] + 1 if pending else len(step.storages)
        for block in asked:
            if not block.is_freed and left[block.num_bytes]:
                left[block.num_bytes] -= 1
                ahead_of.setdefault(pending.pop(0), []).extend(waiting)
                waiting = []
                continue
            death = at + (not block.passes) if block.is_freed else len(step.ops)
            op = step.ops[at]
            storage = Storage(
                nbytes=block.num_bytes,
                device=device,
                category="temporary",
                birth=at,
                dropped=death,
                death=death,
                module=op.module if block.is_freed else -1,
                phase=op.phase if block.is_freed else "other",
                batched=False,
                dtype="uint8",
            )
            waiting.append(storage)
            if not block.is_freed:
                held.append(storage)
        ahead_of.setdefault(after, []).extend(waiting)
    return _renumbered(step, ahead_of), held


def _renumbered(step: Step, ahead_of: dict[int, list[Storage]]) -> Step:
    """Returns the step with new storages ahead of others, all of them numbered in the order of allocation."""
    storages: list[Storage] = []
    number_of: dict[int, int] = {-1: -1, -2: -2}
    for number, storage in enumerate(step.storages):
        storages += ahead_of.get(number, ())
        number_of[number] = len(storages)
        storages.append(storage)
    storages += ahead_of.get(len(step.storages), ())

    def renamed(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number_of[number] for number in numbers)

    replace = msgspec.structs.replace
    return replace(
        step,
        storages=tuple(storages),
        ops=tuple(
            replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs), writes=renamed(op.writes))
            for op in step.ops
        ),
        saved=tuple(replace(saving, storage=number_of[saving.storage]) for saving in step.saved),
        calls=tuple(replace(call, inputs=renamed(call.inputs), outputs=renamed(call.outputs)) for call in step.calls),
    )
