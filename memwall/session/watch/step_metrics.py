"""Hands the figures of each training step to whoever asks for them, while the run goes on."""

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from memwall.machine.meter import CudaMeter
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.predict.curve import peak_of
from memwall.session.measurements import Measurements
from memwall.trace.records import Trace


class StepMetrics(Struct, frozen=True, kw_only=True):
    """Holds what one training step needed; bytes are those of the process on the model's device."""

    schema: Literal["memwall.step/1"] = "memwall.step/1"
    step: int
    """Counts from 1."""
    unix_seconds: float
    """The time at which the step ended, in seconds since 1970."""
    is_planned: bool
    """Whether it ran under a plan; the first one is recorded, to plan from."""
    step_seconds: float | None
    """Seconds from its first forward to the end of its last optimizer's step; None for a step that was not timed."""
    peak_bytes: int
    """The most that the process held in the step."""
    budget_bytes: int
    forecast_bytes: int | None
    """The most that the plan foresees of a step; None without a plan."""
    bytes_to_tier: int
    """Bytes that this step has moved to the next tier: the disk, or host memory below a CUDA device."""
    bytes_from_tier: int
    """Bytes that it has fetched back."""
    num_actions: int
    """Actions of the plan in effect."""
    num_replans: int
    """Plans of the run so far that were made since a step used more than foreseen."""
    oom_recoveries: int
    """Steps of the run so far that were done again after memory ran out."""
    device: str = "cpu"
    """The kind of device that the model is on: "cpu" or "cuda"."""
    forecast_by_category: dict[str, int] = {}
    """Bytes of tensors where the plan foresees most of them, by what they are; none without a recorded step."""
    active_bytes: int | None = None
    """On CUDA the most that tensors had in use in the step; None elsewhere, and of the recorded step."""
    reserved_bytes: int | None = None
    """On CUDA the most that torch's segments held."""
    num_alloc_retries: int | None = None
    """On CUDA the requests of the process so far that were granted only after torch's cache had been given back."""
    device_bytes: int | None = None
    """On CUDA what the device has."""


class StepLog:
    """Makes the figures of each step, and hands them over once its seconds are known, which is one step later.

    Until somebody asks by setting `on_step`, nothing is counted.

    Args:
        moved_bytes: returns the bytes that the run has moved to the next tier until now, and back.
    """

    def __init__(self, measured: Measurements, moved_bytes: Callable[[], tuple[int, int]]) -> None:
        self.on_step: Callable[[StepMetrics], None] | None = None
        """Is called with the figures of each step that has ended."""
        self._measured = measured
        self._waiting: StepMetrics | None = None
        self._moved_bytes = moved_bytes
        self._begun_bytes = (0, 0)
        self._plan: Plan | None = None
        self._by_category: dict[str, int] = {}

    def begin_step(self) -> None:
        """Says that a step begins."""
        if self.on_step is not None:
            self._begun_bytes = self._moved_bytes()

    def end_step(
        self,
        peak_bytes: int,
        trace: Trace | None,
        plan: Plan | None,
        *,
        is_first: bool,
        is_planned: bool,
        budget_bytes: int,
    ) -> None:
        """Notes a step that has ended, or gone on with a further optimizer's; to be called once somebody asks.

        Args:
            trace: of the step that the plan was made from; None where none was recorded, or there is none.
            plan: the one that stands; None before there is one.
            is_first: whether its first optimizer has stepped.
        """
        if is_first:
            self.flush()
        elif self._waiting is not None:
            peak_bytes = max(peak_bytes, self._waiting.peak_bytes)
        out_bytes, in_bytes = (now - then for now, then in zip(self._moved_bytes(), self._begun_bytes, strict=True))
        self._waiting = StepMetrics(
            step=self._measured.num_steps,
            unix_seconds=time.time(),
            is_planned=is_planned,
            step_seconds=None,
            peak_bytes=peak_bytes,
            budget_bytes=budget_bytes,
            forecast_bytes=None if plan is None else plan.forecast.steady_process_bytes,
            bytes_to_tier=out_bytes,
            bytes_from_tier=in_bytes,
            num_actions=0 if plan is None else len(plan.actions),
            num_replans=self._measured.num_replans,
            oom_recoveries=self._measured.oom_recoveries,
            device=self._measured.meter.device,
            forecast_by_category=self._foreseen_bytes(trace, plan),
            **self._of_device(is_planned=is_planned),
        )

    def _foreseen_bytes(self, trace: Trace | None, plan: Plan | None) -> dict[str, int]:
        """Returns the bytes of tensors at a plan's highest point by category, the most first; looks once."""
        if trace is None or plan is None:
            return {}
        if plan is not self._plan:
            peak = peak_of(trace, step_under_plan(trace, plan))
            self._plan, self._by_category = plan, {share.name: share.num_bytes for share in peak.by_category}
        return self._by_category

    def _of_device(self, *, is_planned: bool) -> dict[str, Any]:
        """Returns what the allocator of a CUDA device has counted in a step under a plan; nothing elsewhere."""
        found, meter = self._measured.last_allocator, self._measured.meter
        if not is_planned or found is None or not isinstance(meter, CudaMeter):
            return {}
        return {
            "active_bytes": found.active_bytes,
            "reserved_bytes": found.reserved_bytes,
            "num_alloc_retries": found.num_retries,
            "device_bytes": meter.total_bytes,
        }

    def note_seconds(self, seconds: float) -> None:
        """Hands over the step that took so long."""
        self._measured.note_seconds(seconds)
        if self._waiting is not None:
            self._waiting = msgspec.structs.replace(self._waiting, step_seconds=seconds)
            self.flush()

    def flush(self) -> None:
        """Hands over the step whose seconds nobody will tell."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self.on_step is not None:
            self.on_step(waiting)
