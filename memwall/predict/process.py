"""The process's peak: resident bytes before the run, tensors, and what the allocator keeps of freed ones.

What a heap keeps beyond its live blocks depends on small blocks that no trace knows, so a forecast alone cannot promise
it. A plan therefore watches: where a block begins, and the resident bytes plus what that block will need would exceed
the limit, free pages are returned first. The replay says how often that happens and what it costs.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from memwall.predict.curve import live_curve
from memwall.predict.malloc import (
    MallocPolicy,
    candidate_policies,
    policy_named,
    replay,
    replay_step,
    restored_policy,
    unavailable_reason,
)
from memwall.predict.malloc_events import events_of
from memwall.predict.treatment import BlockCalls, StepModel
from memwall.trace.records import Step, Trace

__all__ = ["ProcessModel", "Resident", "TrimPoints", "calibrated", "trim_points"]


class TrimPoints(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the heap is watched, and above how many process bytes its free pages are returned there."""

    forward: dict[str, int] = {}
    """Block path -> bytes, looked at before its forward."""
    backward: dict[str, int] = {}
    optimizer_bytes: int | None = None
    """Before the optimizer's step; None for not at all."""


class Resident(Struct, frozen=True, kw_only=True):
    """What a step makes resident under one way of reusing freed memory."""

    policy: str
    is_default: bool
    """Whether this is how the process behaves anyway, so that nothing has to be applied."""
    process_bytes: int
    fault_seconds: float
    """Time that pages becoming resident anew cost in a step."""
    num_trims: int


class ProcessModel:
    """Base, workspace and allocator of the process that a trace was recorded in."""

    def __init__(self, trace: Trace) -> None:
        self.base_bytes = trace.base_bytes
        self.workspace_bytes = trace.workspace_bytes
        self._trace = trace
        names = {policy.name for policy in candidate_policies()}
        self._watched_policy = "compact" if "compact" in names else "heap"
        self._has_malloc = trace.device == "cpu" and not unavailable_reason()

    def bare(self, step: Step) -> Resident:
        """The step where nothing is known about what the allocator keeps: tensors alone."""
        live_bytes = int(live_curve(step.storages, len(step.ops), device=self._trace.device).max())
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self.base_bytes + self.workspace_bytes + live_bytes,
            fault_seconds=0.0,
            num_trims=0,
        )

    def free(self, step: Step) -> Resident:
        """The step in a process that memwall never touched."""
        return self._unsteered(step, policy_named("default"))

    def untreated(self, step: Step) -> Resident:
        """The step with nothing applied, in the process that recorded the trace."""
        # Recording parked sets a malloc policy, and glibc cannot go all the way back.
        return self._unsteered(step, restored_policy() if self._trace.is_parked else policy_named("default"))

    def _unsteered(self, step: Step, policy: MallocPolicy) -> Resident:
        if not self._has_malloc:
            return self.bare(step)
        figures = replay_step(step, policy)
        return msgspec.structs.replace(
            self.bare(step),
            process_bytes=self.base_bytes + self.workspace_bytes + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
        )

    def watched(self, step: Step, blocks: Sequence[BlockCalls], limit_bytes: int) -> Resident | None:
        """The step with the heap held under `limit_bytes` of process memory; None where malloc cannot be steered."""
        if not self._has_malloc:
            return None
        beyond = self.base_bytes + self.workspace_bytes
        _, ceilings = trim_points(self._trace, step, blocks, limit_bytes - beyond)
        figures = replay(policy_named(self._watched_policy), [events_of(step, ceilings=ceilings)] * 3)
        return Resident(
            policy=self._watched_policy,
            is_default=False,
            process_bytes=beyond + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
            num_trims=figures.steps[-1].num_trims,
        )

    def trims(self, step: Step, blocks: Sequence[BlockCalls], limit_bytes: int, window_bytes: int) -> TrimPoints:
        """Where to watch the process so that it stays under a limit; `window_bytes` of staging are in it."""
        beyond = self.base_bytes + self.workspace_bytes + window_bytes
        points, _ = trim_points(self._trace, step, blocks, limit_bytes - beyond)
        return TrimPoints(
            forward={path: ceiling + beyond for path, ceiling in points.forward.items()},
            backward={path: ceiling + beyond for path, ceiling in points.backward.items()},
            optimizer_bytes=None if points.optimizer_bytes is None else points.optimizer_bytes + beyond,
        )

    def mapped(self, step: Step) -> Resident | None:
        """The step with each large block in a mapping of its own, gone when freed: least memory, most page faults."""
        if not self._has_malloc:
            return None
        figures = replay_step(step, policy_named("mmap"))
        return Resident(
            policy="mmap",
            is_default=False,
            process_bytes=self.base_bytes + self.workspace_bytes + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
            num_trims=0,
        )

    def not_modelled(self) -> tuple[str, ...]:
        """What the forecast leaves out, for a person."""
        return (
            "evaluation, saving and resuming",
            "batches larger than the recorded one",
            "memory of data loader workers and other processes",
        )


def trim_points(
    trace: Trace, step: Step, blocks: Sequence[BlockCalls], limit_bytes: int
) -> tuple[TrimPoints, Mapping[int, int]]:
    """Where to watch the heap in a step, for the executor by block and for the replay by operation.

    At a point that needs `need` more bytes until the next one, resident bytes above limit - need are too many: the
    heap's free pages need not fit what is asked for next, so they are not counted on. Counting on half of them
    exceeded budgets by 1 % (tests/scripts/train_plain.py). All figures without the process's base.
    """
    curve = live_curve(step.storages, len(step.ops), device=trace.device)
    born = np.zeros(len(step.ops), dtype=np.int64)
    for storage in step.storages:
        if 0 <= storage.birth < len(step.ops) and storage.death > storage.birth:
            born[storage.birth] += storage.nbytes
    paths = {block.module: block.path for block in blocks}
    places: dict[int, tuple[str, str]] = {}
    for call in step.calls:
        if call.module in paths:
            places[call.start] = ("forward", paths[call.module])
            if call.backward_start >= 0:
                places[call.backward_start] = ("backward", paths[call.module])
    for name, op in step.marks:
        if name == "optimizer":
            places[op] = ("optimizer", "")
    order = sorted(op for op in places if op < len(step.ops))
    ceilings: dict[int, int] = {}
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    optimizer_bytes: int | None = None
    for op, after in zip(order, [*order[1:], len(step.ops)], strict=True):
        need = max(0, int(curve[op:after].max()) - int(curve[op] - born[op])) if after > op else 0
        ceiling = ceilings[op] = limit_bytes - need
        side, path = places[op]
        if side == "forward":
            forward[path] = min(forward.get(path, ceiling), ceiling)
        elif side == "backward":
            backward[path] = min(backward.get(path, ceiling), ceiling)
        else:
            optimizer_bytes = ceiling if optimizer_bytes is None else min(optimizer_bytes, ceiling)
    return TrimPoints(forward=forward, backward=backward, optimizer_bytes=optimizer_bytes), ceilings


def calibrated(trace: Trace, *, resident_bytes: int, standing_bytes: int, window_bytes: int, min_bytes: int) -> Trace:
    """The trace with base and workspace as measured after its first step, which was recorded parked.

    Args:
        resident_bytes: process bytes now, between steps, free heap pages returned.
        standing_bytes: of these, bytes of tensors the trace knows: parameters, buffers, gradients, optimizer state.
        window_bytes: staging memory of the recorded step.
        min_bytes: from which size on saved tensors were moved.
    """
    base_bytes = resident_bytes - standing_bytes
    step = trace.steps[0]
    parked = StepModel(step, trace.names, ()).parked(min_bytes)
    live_bytes = int(live_curve(parked.storages, len(parked.ops), device=trace.device).max())
    beyond = step.process_peak_bytes - base_bytes - live_bytes - window_bytes
    return msgspec.structs.replace(trace, base_bytes=base_bytes, workspace_bytes=max(0, beyond))
