"""The process's peak: resident bytes before the run, tensors, and what the allocator keeps of freed ones.

What malloc keeps depends on small blocks between the tensors, which no trace knows: a GPT whose tensors need 807 MiB
grew by 988 MiB (benchmarks/heap.py). A plan therefore gives tensors a heap of their own, which keeps next to
nothing and can be replayed to the page.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from memwall.predict.cuda_allocator.advice import AllocatorAdvice
from memwall.predict.cuda_allocator.step_peaks import allocated_peak_bytes
from memwall.predict.curve import live_curve, live_peak_bytes
from memwall.predict.malloc.malloc_calls import events_of
from memwall.predict.malloc.malloc_replay import replay, unavailable_reason
from memwall.predict.malloc.tensor_heap import MIN_TENSOR_BYTES, heap_unavailable_reason, replay_in_heap
from memwall.predict.state_on_disk import before_optimizer
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace

TENSOR_HEAP = "tensor-heap"
"""Name of the way of reuse that `memwall.predict.malloc.tensor_heap` forecasts."""

# Margin as a share of the bytes that the forecast adds to the base, which is itself measured; see benchmarks/knobs.py.
_MARGIN_SHARE = 0.05
# No forecast of a process is better than this: Python objects, graph nodes, thread stacks.
_LEAST_MARGIN_BYTES = 16 << 20
# Without anything applied nothing holds the heap to the forecast: it must fit with this much more of what the step
# adds. Small models fragment most: 45 % was seen on a GPT-2 of 12 MB (tests/integrations/scripts, 2026-11-20).
_UNWATCHED_SHARE = 0.5
# Of tensors too small for the heap malloc gives back little between the forwards of a step: where LBFGS called an
# unrolled recurrent model four times, those of 71 MiB took 115, and of 61 MiB, beside recomputed calls, 118.
_SMALL_LOST_SHARE = 1.0
# To replay a step under malloc takes some 2 KB of this process for each of its storages, and seconds for 100,000 of
# them; a step of LBFGS whose closure unrolls a thousand cells has millions.
_MOST_REPLAYED_STORAGES = 30_000


class Resident(Struct, frozen=True, kw_only=True):
    """Says what a step makes resident under one way of reusing freed memory."""

    policy: str
    is_default: bool
    """Whether this is how the process behaves anyway, so that nothing has to be applied."""
    process_bytes: int
    fault_seconds: float
    """Time that pages becoming resident anew cost in a step."""
    outside_bytes: int = 0
    """Bytes that a step needs outside the tensor heap and gives back: workspace, small tensors that malloc holds."""
    cuda_setting: str = ""
    """Settings of the CUDA allocator that this takes; "" for those of the process."""
    saved_bytes: int = 0
    """Bytes that they hold less than the default ones."""


class Process(Protocol):
    """Answers the search for a plan about the process that the plan would run in."""

    base_bytes: int
    """Bytes that it holds before the step."""
    workspace_bytes: int
    """Bytes that operators need for themselves, where the step's records leave it out."""
    next_tier: Literal["host", "disk"]
    """Tier of the bytes that leave memory."""
    gives_back: bool = False
    """Whether the allocator is simulated full as well: else `crowded` forecasts what `treated` does."""

    @property
    def allocator_advice(self) -> AllocatorAdvice | None:
        """Says what to set the CUDA allocator to for the run without any action; None where it is not simulated."""

    def free(self, step: Step) -> Resident:
        """Forecasts the step in a process that memwall never touched."""

    def untreated(self, step: Step) -> Resident:
        """Forecasts the step with nothing applied, in the process that recorded the trace."""

    def treated(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the step with a plan applied that may use `limit_bytes` of process memory."""

    def crowded(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the same where an allocator may give back what it keeps, and ask for it anew, in every step.

        Where even that is more than the limit, it forecasts the least that the step can do with.
        """

    def bare(self, step: Step) -> Resident:
        """Forecasts the step where nothing is known about what the allocator keeps: tensors alone."""

    def fits_untouched(self, process_bytes: int, *, budget_bytes: int, limit_bytes: int) -> bool:
        """Tells whether a forecast keeps to the budget with nothing applied; the limit is the budget less a margin."""

    def margin_bytes(self, process_bytes: int) -> int:
        """Returns the bytes that may be added to a forecast."""

    def budget_for(self, process_bytes: int) -> int:
        """Returns the smallest budget that leaves room for the margin, which grows with the budget."""

    def reserved_bytes(self, process_bytes: int) -> int | None:
        """Returns what a caching allocator holds of a forecast; None where the process has none that is modelled."""

    def not_modelled(self) -> tuple[str, ...]:
        """Says what the forecast leaves out, for a person."""


def budget_for(process_bytes: int, base_bytes: int) -> int:
    """Returns the smallest budget that leaves room for the margin of a step in a process.

    Args:
        process_bytes: what the process is foreseen to hold in the step.
        base_bytes: what it holds before.
    """
    least_bytes = base_bytes + math.ceil((process_bytes - base_bytes) / (1 - _MARGIN_SHARE)) + 1
    return max(process_bytes + _LEAST_MARGIN_BYTES, least_bytes)


class ProcessModel(Process):
    """Forecasts steps in the process that a trace was recorded in."""

    def __init__(self, trace: Trace) -> None:
        self.base_bytes = trace.base_bytes
        self.workspace_bytes = trace.workspace_bytes
        self.next_tier: Literal["host", "disk"] = "disk" if trace.device == "cpu" else "host"
        self._trace = trace
        self._has_malloc = trace.device == "cpu" and not unavailable_reason()
        self._has_heap = trace.device == "cpu" and not heap_unavailable_reason()
        self._freed: tuple[Step, Resident] | None = None
        """The step that was forecast last under malloc: that without a plan is asked for again and again."""

    @property
    def allocator_advice(self) -> None:
        """Nothing: this process runs already."""

    def free(self, step: Step) -> Resident:
        """Forecasts the step under malloc as it is; of more tensors than can be replayed, them alone."""
        if not self._has_malloc or len(step.storages) > _MOST_REPLAYED_STORAGES:
            return self.bare(step)
        if self._freed is None or self._freed[0] is not step:
            figures = replay(events_of(step))
            found = Resident(
                policy="default",
                is_default=True,
                process_bytes=self._beyond_tensors + figures.peak_resident_bytes,
                fault_seconds=figures.fresh_bytes * self._trace.machine.fault_seconds_per_byte,
            )
            self._freed = step, found
        return self._freed[1]

    def untreated(self, step: Step) -> Resident:
        return self.free(step)

    def treated(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the step in the heap, which keeps to the tensors' own bytes; under malloc where there is none."""
        return self._in_heap(step, limit_bytes) if self._has_heap else self.free(step)

    def crowded(self, step: Step, limit_bytes: int) -> Resident:
        return self.treated(step, limit_bytes)

    def bare(self, step: Step) -> Resident:
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self._beyond_tensors + live_peak_bytes(step, self._trace.device),
            fault_seconds=0.0,
        )

    def fits_untouched(self, process_bytes: int, *, budget_bytes: int, limit_bytes: int) -> bool:
        """Tells whether a forecast keeps to the budget though nothing holds the heap to it."""
        unwatched = process_bytes + int((process_bytes - self.base_bytes) * _UNWATCHED_SHARE)
        return unwatched + _LEAST_MARGIN_BYTES <= budget_bytes

    def margin_bytes(self, process_bytes: int) -> int:
        return max(int((process_bytes - self.base_bytes) * _MARGIN_SHARE), _LEAST_MARGIN_BYTES)

    def budget_for(self, process_bytes: int) -> int:
        return budget_for(process_bytes, self.base_bytes)

    def reserved_bytes(self, process_bytes: int) -> int | None:
        """Nothing is told apart."""
        return None

    def not_modelled(self) -> tuple[str, ...]:
        return (
            "evaluation, saving and resuming",
            "batches larger than the recorded one",
            "memory of data loader workers and other processes",
        )

    @property
    def _beyond_tensors(self) -> int:
        return self.base_bytes + self.workspace_bytes

    def _in_heap(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the step with its tensors in a heap of their own, held under `limit_bytes` of process memory."""
        events = events_of(step, has_small_blocks=False)
        # What malloc was seen to hold beyond them is in the measured workspace already.
        lost_bytes = max(0, int(_SMALL_LOST_SHARE * _passing_small_bytes(step)) - self.workspace_bytes)
        beyond_bytes = self._beyond_tensors + lost_bytes
        figures = replay_in_heap(events, max(limit_bytes - beyond_bytes, 1))
        return Resident(
            policy=TENSOR_HEAP,
            is_default=False,
            process_bytes=beyond_bytes + figures.peak_resident_bytes,
            fault_seconds=figures.fresh_bytes * self._trace.machine.heap_fault_seconds_per_byte,
            outside_bytes=self.workspace_bytes + lost_bytes + figures.small_bytes,
        )


def calibrated(
    trace: Trace,
    *,
    base_bytes: int,
    window_bytes: int,
    min_bytes: int,
    away_min_bytes: int | None = None,
    peak_before_optimizer_bytes: int = 0,
    outside_bytes: int | None = None,
    kept_bytes: int | None = None,
    absent_bytes: int = 0,
    read_ahead_bytes: int = 0,
    allocated_bytes: int | None = None,
    as_run: Callable[[Step], Step] = lambda step: step,
) -> Trace:
    """Returns the trace with base and workspace as measured after its first step, which was recorded parked.

    Args:
        base_bytes: process bytes now, between steps, free heap pages returned, without the tensors that the trace
            knows: parameters, buffers, gradients, optimizer state.
        window_bytes: staging memory of the recorded step.
        min_bytes: from which size on saved tensors were moved.
        away_min_bytes: from which size on the optimizer's state was on disk, outside the optimizer; None if none was.
        peak_before_optimizer_bytes: where state was on disk, what the process held at most before the optimizer ran.
        outside_bytes: the most that the process held outside the tensor heap and has given back since, staging memory
            included; None where that is not known. Then it is what the forecast of the heap leaves of the peak:
            tensors that were read ahead of their use, say, which are no workspace.
        kept_bytes: free pages that the tensor heap held at the peak, which depend on the budget and are no workspace;
            None where that is not known, and is forecast.
        absent_bytes: what was on disk of tensors that the step's records have in memory, as the parameters of a model
            that is trained by none of its optimizers.
        read_ahead_bytes: of a device, what of moved tensors may come back ahead of its use.
        allocated_bytes: of a device, what its allocator handed out at most. What lies in its segments besides is no
            workspace: how it cuts them up hangs on the step, and is forecast.
        as_run: what else differs between the step that the trace describes and the one that ran.
    """
    step = trace.steps[0]
    if outside_bytes is not None:
        beyond = outside_bytes - window_bytes - _passing_small_bytes(step)
        return msgspec.structs.replace(trace, base_bytes=base_bytes, workspace_bytes=max(0, beyond))
    peak_bytes = step.process_peak_bytes if away_min_bytes is None else peak_before_optimizer_bytes
    tensor_bytes = parked_bytes(
        trace,
        as_run(step),
        min_bytes=min_bytes,
        away_min_bytes=away_min_bytes,
        kept_bytes=kept_bytes,
        read_ahead_bytes=read_ahead_bytes,
    )
    held_bytes = peak_bytes - base_bytes - window_bytes if allocated_bytes is None else allocated_bytes
    beyond = held_bytes - (tensor_bytes - absent_bytes)
    return msgspec.structs.replace(trace, base_bytes=base_bytes, workspace_bytes=max(0, beyond))


def parked_bytes(
    trace: Trace,
    step: Step,
    *,
    min_bytes: int,
    away_min_bytes: int | None,
    kept_bytes: int | None = None,
    read_ahead_bytes: int = 0,
) -> int:
    """Returns the most that tensors of a step recorded parked hold; where state is on disk, up to its optimizer.

    Args:
        step: of the trace, or as it ran. min_bytes, away_min_bytes, kept_bytes, read_ahead_bytes: see `calibrated`.
    """
    parked = StepModel(step, trace.names, ()).parked(min_bytes, read_ahead_bytes=read_ahead_bytes)
    if away_min_bytes is not None:
        parked = before_optimizer(parked, away_min_bytes)
    if trace.device == "cpu" and not heap_unavailable_reason():
        # A ceiling of next to nothing has free pages returned at once.
        ceiling_bytes = 0 if kept_bytes is None else 1
        events = events_of(parked, has_small_blocks=False)
        return replay_in_heap(events, ceiling_bytes, num_steps=1).peak_resident_bytes + (kept_bytes or 0)
    if trace.device == "cuda":
        return allocated_peak_bytes(parked)
    return live_peak_bytes(parked, trace.device)


def _passing_small_bytes(step: Step) -> int:
    """Returns the most that tensors too small for the heap hold at once, of those that are there in the step alone."""
    num_ops = len(step.ops)
    passing = [s for s in step.storages if s.nbytes < MIN_TENSOR_BYTES and (s.birth >= 0 or s.death < num_ops)]
    return int(live_curve(passing, num_ops, device="cpu").max()) if passing else 0
