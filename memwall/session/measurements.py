"""The figures that a session measures while it runs, and counts between steps."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.machine.device_peaks import AllocatorPeak, SeparatePeaks, reserved_peaks
from memwall.machine.meter import CudaMeter, HostMeter, Meter, meter_of, process_peak_bytes
from memwall.torch_internals.allocator import clear_cublas_workspaces
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.torch_internals.storages import dense_parts
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import Trace

_NOTABLE_BYTES = 16 << 20
"""Growth before the first step that is the script's own work: the margin has room for less, as for Python's."""


class Measurements(Struct, kw_only=True):
    """Holds what was measured while a session ran; its methods alone change it."""

    reserved_before: dict[int, int] = msgspec.field(default_factory=reserved_peaks)
    """The most that torch's segments held on each device before the session began."""
    meter: Meter = msgspec.field(default_factory=HostMeter)
    """Knows the process bytes of the device that the model is on, which are meant below."""
    begin_peak_bytes: int = msgspec.field(default_factory=process_peak_bytes)
    """The most that the process held before the run began."""
    before_bytes: int = 0
    """The most that it held between that and the first forward, where that was notably more: of a run on a CPU."""
    first_step_peak_bytes: int = 0
    peak_bytes: int = 0
    """Highest process bytes of the steps under the plan, but for those on a device that `proof_peak_bytes` is of."""
    proof_peak_bytes: int = 0
    """Highest process bytes of steps on a device in which actions proved themselves by what the budget left."""
    replaced_peak_bytes: int = 0
    """Highest process bytes of steps under plans that another one has replaced."""
    last_peak_bytes: int = 0
    """Highest process bytes of the last step."""
    overall_peak_bytes: int = 0
    """Highest process bytes of the whole run, which has to keep to the budget."""
    standing_bytes: int = 0
    """Bytes that were held when the last step had ended."""
    base_bytes: int = 0
    step_seconds: list[float] = []
    num_steps: int = 0
    num_replans: int = 0
    lost: dict[tuple[str, str], str] = {}
    """Actions of the plan, by tag and block, that the run has found to change the training and dropped, and why."""
    unproven: dict[str, str] = {}
    """Actions of the plan, by kind, that could not prove themselves, and why."""
    oom_recoveries: int = 0
    """Failures to get memory after which a step was done again."""
    bytes_to_tier: int = 0
    first_step_bytes_to_tier: int = 0
    """The part of these that was moved before the plan was in effect: in the recorded step, under the safest plan."""
    bytes_from_tier: int = 0
    plan_seconds: float = 0.0
    has_plan: bool = False
    """Whether a plan was in effect already."""
    allocator: AllocatorPeak | None = None
    """The most that the caching allocator counted in the steps under the plan; None where there is none."""
    last_allocator: AllocatorPeak | None = None
    """The same of the last step under a plan."""
    script_peaks: SeparatePeaks | None = None
    shown_bytes: Callable[[], int] = lambda: 0
    """Returns what the system holds to show parameters that are on disk, and can take back."""
    showing: AbstractContextManager[object] = msgspec.field(default_factory=threading.RLock)
    """Is held while that is counted, or let go of, by whichever thread does so."""

    @classmethod
    def since(cls, begin_peak_bytes: int | None) -> Self:
        """Returns those of a run before which the process held this at most; None for what it has held until now."""
        return cls() if begin_peak_bytes is None else cls(begin_peak_bytes=begin_peak_bytes)

    def held_peak_bytes(self) -> int:
        """Returns what the process has held at most, for warning and verdict, without what the system can take back."""
        with self.showing:
            return self.meter.peak_bytes() - self.shown_bytes()

    def note_peak(self) -> int:
        """Notes what the process held at most, and returns it; to be called before each reset of that, and at the end.

        What the system can take back is no part of it.
        """
        peak_bytes = self.held_peak_bytes()
        self.note(peak_bytes)
        return peak_bytes

    def note(self, peak_bytes: int) -> None:
        """Notes that the process has held so much."""
        self.overall_peak_bytes = max(self.overall_peak_bytes, peak_bytes)

    def begin_run(self, model: nn.Module) -> None:
        """Measures the device of a model from now on."""
        self.meter = meter_of(model)
        if isinstance(self.meter, CudaMeter) and self.script_peaks is None:
            self.script_peaks = SeparatePeaks.begin(self.meter.place)
            index = torch.cuda.current_device() if self.meter.place.index is None else self.meter.place.index
            if self.meter.allocator_peak().reserved_bytes == self.reserved_before.get(index):
                # What was held before the session is none of its budget's, and what lies free of that is given back;
                # so is cuBLAS' workspace, which would hold on to a segment that plans count on.
                clear_cublas_workspaces()
                torch.cuda.empty_cache()
                self.meter.reset_peak()
        peak_bytes = self.note_peak()
        grown_bytes = peak_bytes - self.begin_peak_bytes
        if self.meter.device == "cpu" and not self.num_steps and grown_bytes > _NOTABLE_BYTES:
            self.before_bytes = peak_bytes

    def end_run(self) -> None:
        """Leaves torch's peaks to the script."""
        if self.script_peaks is not None:
            self.script_peaks.undo()
            self.script_peaks = None

    def begin_plan(self, base_bytes: int | None) -> None:
        """Measures steps under a plan from now on.

        Args:
            base_bytes: what the process holds before each step; None for what it holds now.
        """
        self.meter.reset_peak()
        self.has_plan = True
        self.base_bytes = self.meter.now_bytes() if base_bytes is None else base_bytes

    def forget_steps(self) -> None:
        """Forgets what was measured of another plan's steps."""
        self.replaced_peak_bytes = max(self.replaced_peak_bytes, self.peak_bytes, self.proof_peak_bytes)
        self.peak_bytes, self.proof_peak_bytes, self.step_seconds, self.allocator = 0, 0, [], None

    def note_first_step(self, peak_bytes: int) -> None:
        """Notes the peak of a recorded step; there are two of them where the first was not the last."""
        self.first_step_peak_bytes = max(self.first_step_peak_bytes, peak_bytes)
        self.note(peak_bytes)

    @property
    def steady_peak_bytes(self) -> int:
        """Returns the most of the steps that a forecast is of; of the first one where there was no other."""
        return self.peak_bytes or self.proof_peak_bytes or self.first_step_peak_bytes

    def end_step(self, *, is_planned: bool, is_proof: bool, is_first: bool) -> int:
        """Counts a step that has ended; returns what the process held in it at most.

        Args:
            is_planned: whether it ran under a plan.
            is_proof: whether the plan's actions proved themselves in it.
            is_first: whether its first optimizer has stepped now, or a further one.
        """
        self.standing_bytes, peak_bytes = self.meter.held()
        self.note(peak_bytes)
        self.last_peak_bytes = peak_bytes if is_first else max(self.last_peak_bytes, peak_bytes)
        self.num_steps += is_first
        if is_planned:
            found = self.last_allocator = self.meter.allocator_peak()
            # A CPU's heap is held to the forecast in these steps, too.
            if is_proof and found is not None:
                self.proof_peak_bytes = max(self.proof_peak_bytes, peak_bytes)
                return peak_bytes
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            if found is not None:
                self.allocator = found if self.allocator is None else self.allocator.joined(found)
        return peak_bytes

    def note_unproven(self, reason: str) -> None:
        """Notes why parts of batches could not be compared with the whole; "" where all were."""
        self.unproven = {"accumulate": reason} if reason else {}

    def note_seconds(self, seconds: float) -> None:
        """Notes how long a step under the plan took."""
        self.step_seconds.append(seconds)

    def count_moved(self, out_bytes: int, in_bytes: int, *, is_recorded: bool = False) -> None:
        """Counts bytes that were moved to the next tier, and back.

        Args:
            is_recorded: whether that was before the plan was in effect.
        """
        self.bytes_to_tier += out_bytes
        self.bytes_from_tier += in_bytes
        self.first_step_bytes_to_tier += out_bytes if is_recorded else 0

    def count_replan(self) -> None:
        """Counts a plan that was made since a step used more than foreseen."""
        self.num_replans += 1

    def count_recovery(self) -> None:
        """Counts a step that is done again."""
        self.oom_recoveries += 1

    def note_planning(self, seconds: float) -> None:
        """Notes the time between the recorded step and its plan."""
        self.plan_seconds = seconds


def standing_bytes(model: nn.Module, optimizers: Optimizers, trace: Trace) -> int:
    """Returns the bytes of tensors in the machine's memory that stand between steps.

    These are parameters, buffers, gradients, the optimizer's state, and the batch.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for optimizer in optimizers_of(optimizers):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    dense = [part for tensor in map(local_part, tensors) for part in dense_parts(tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in dense if t.device.type == "cpu"}
    batch = sum(s.nbytes for s in trace.steps[0].storages if s.category == "input" and s.device == "cpu")
    return sum(storages.values()) + batch


def trained_parameters(model: nn.Module) -> tuple[bool, ...]:
    """Returns of each parameter whether it takes gradients."""
    with without_subclass_functions():  # to look at parameters on disk does not bring them in
        return tuple(parameter.requires_grad for parameter in model.parameters())
