"""The process's peak: resident bytes before the run, tensors, and what the allocator keeps of freed ones."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from memwall.predict.curve import live_curve
from memwall.predict.malloc import candidate_policies, replay_step
from memwall.predict.treatment import BlockCalls, StepModel
from memwall.trace.records import Step, Trace

__all__ = ["ProcessModel", "Resident", "calibrated"]


class Resident(Struct, frozen=True, kw_only=True):
    """What a step makes resident under one way of reusing freed memory."""

    policy: str
    is_default: bool
    """Whether this is how the process behaves anyway, so that nothing has to be applied."""
    trim_forward: tuple[str, ...]
    """Blocks before whose forward free pages are returned."""
    trim_backward: tuple[str, ...]
    process_bytes: int
    fault_seconds: float
    """Time that pages becoming resident anew cost in a step, beyond the default's."""


class ProcessModel:
    """Base, workspace and allocator of the process that a trace was recorded in."""

    def __init__(self, trace: Trace) -> None:
        self.base_bytes = trace.base_bytes
        self.workspace_bytes = trace.workspace_bytes
        self._trace = trace

    def residents(self, step: Step, blocks: Sequence[BlockCalls]) -> tuple[Resident, ...]:
        """The process peak of a step under every allocator policy, cheapest in time first."""
        found = []
        for policy in candidate_policies():
            figures = replay_step(step, policy, blocks)
            found.append(
                Resident(
                    policy=policy.name,
                    is_default=policy.is_default,
                    trim_forward=tuple(b.path for b in blocks) if policy.trims_forward else (),
                    trim_backward=tuple(b.path for b in blocks) if policy.trims_backward else (),
                    process_bytes=self.base_bytes + self.workspace_bytes + figures.peak_resident_bytes,
                    fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
                )
            )
        usual = next((r.fault_seconds for r in found if r.is_default), 0.0)
        relative = [msgspec.structs.replace(r, fault_seconds=r.fault_seconds - usual) for r in found]
        return tuple(sorted(relative, key=lambda r: (r.fault_seconds, r.process_bytes, r.policy)))

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
    live_bytes = int(live_curve(parked.storages, len(parked.ops), device=trace.device).max())
    beyond = step.process_peak_bytes - base_bytes - live_bytes - window_bytes
    return msgspec.structs.replace(trace, base_bytes=base_bytes, workspace_bytes=max(0, beyond))
