"""The process's peak: resident bytes before the run, tensors, and what the allocator keeps of freed ones.

What malloc keeps depends on small blocks between the tensors, which no trace knows: a GPT whose tensors need 807 MiB
grew by 988 MiB (benchmarks/heap.py). A plan therefore gives tensors a heap of their own, which keeps next to
nothing and can be replayed to the page, or else has malloc map each by itself.
"""

import msgspec
from msgspec import Struct

from memwall.predict.curve import live_peak_bytes
from memwall.predict.malloc import MallocPolicy, policy_named, replay_step, restored_policy, unavailable_reason
from memwall.predict.malloc_events import events_of
from memwall.predict.tensor_heap import heap_unavailable_reason, replay_in_heap
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace

__all__ = ["TENSOR_HEAP", "ProcessModel", "Resident", "calibrated"]

TENSOR_HEAP = "tensor-heap"
"""Name of the way of reuse that `memwall.predict.tensor_heap` forecasts, beside malloc's policies."""


class Resident(Struct, frozen=True, kw_only=True):
    """What a step makes resident under one way of reusing freed memory."""

    policy: str
    is_default: bool
    """Whether this is how the process behaves anyway, so that nothing has to be applied."""
    process_bytes: int
    fault_seconds: float
    """Time that pages becoming resident anew cost in a step."""
    outside_bytes: int = 0
    """What a step needs outside the tensor heap and gives back: workspace, and the small tensors that malloc holds."""


class ProcessModel:
    """Base, workspace and allocator of the process that a trace was recorded in."""

    def __init__(self, trace: Trace) -> None:
        self.base_bytes = trace.base_bytes
        self.workspace_bytes = trace.workspace_bytes
        self._trace = trace
        self._has_malloc = trace.device == "cpu" and not unavailable_reason()
        self._has_heap = trace.device == "cpu" and not heap_unavailable_reason()

    def bare(self, step: Step) -> Resident:
        """The step where nothing is known about what the allocator keeps: tensors alone."""
        live_bytes = live_peak_bytes(step, self._trace.device)
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self.base_bytes + self.workspace_bytes + live_bytes,
            fault_seconds=0.0,
        )

    def free(self, step: Step) -> Resident:
        """The step in a process that memwall never touched."""
        return self._unsteered(step, policy_named("default"))

    def untreated(self, step: Step) -> Resident:
        """The step with nothing applied, in the process that recorded the trace."""
        # Without a tensor heap, recording parked sets malloc's own thresholds, and glibc cannot go all the way back.
        is_changed = self._trace.is_parked and not self._has_heap
        return self._unsteered(step, restored_policy() if is_changed else policy_named("default"))

    def _unsteered(self, step: Step, policy: MallocPolicy) -> Resident:
        if not self._has_malloc:
            return self.bare(step)
        figures = replay_step(step, policy)
        return msgspec.structs.replace(
            self.bare(step),
            process_bytes=self.base_bytes + self.workspace_bytes + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
        )

    def in_heap(self, step: Step, limit_bytes: int) -> Resident | None:
        """The step with its tensors in a heap of their own, held under `limit_bytes` of process memory.

        None where there is no such heap.
        """
        if not self._has_heap:
            return None
        beyond = self.base_bytes + self.workspace_bytes
        events = events_of(step, has_small_blocks=False)
        figures = replay_in_heap([events] * 3, ceiling_bytes=max(limit_bytes - beyond, 1))
        return Resident(
            policy=TENSOR_HEAP,
            is_default=False,
            process_bytes=beyond + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
            outside_bytes=self.workspace_bytes + figures.small_bytes,
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
        )

    def not_modelled(self) -> tuple[str, ...]:
        """What the forecast leaves out, for a person."""
        return (
            "evaluation, saving and resuming",
            "batches larger than the recorded one",
            "memory of data loader workers and other processes",
        )


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
    if trace.device == "cpu" and not heap_unavailable_reason():
        tensor_bytes = replay_in_heap([events_of(parked, has_small_blocks=False)]).peak_resident_bytes
    else:
        tensor_bytes = live_peak_bytes(parked, trace.device)
    beyond = step.process_peak_bytes - base_bytes - tensor_bytes - window_bytes
    return msgspec.structs.replace(trace, base_bytes=base_bytes, workspace_bytes=max(0, beyond))
