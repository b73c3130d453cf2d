"""The first step of a run, recorded under the safest plan there is.

Every large saved tensor leaves the device, and free memory goes back to the system before the budget is passed. The
optimizer's state goes bucket by bucket, as it is made, to disk or to the host memory below a CUDA device, where the
budget has no room for all of it. On a CPU, where it has none for gradients beside parameters, both are on disk already
when the step begins.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.offload.parking import Parked
from memwall.apply.optimizer_state.open_state import can_place
from memwall.apply.optimizer_state.room_for_state import stepping_bytes
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.open_streaming import is_streamed
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import allowed
from memwall.checkpoint.discovery import find_optimizers, objects_of
from memwall.errors import MemwallError
from memwall.machine.meter import meter_of
from memwall.machine.process_group import num_processes
from memwall.planning.menu import WINDOW_BYTES, recorded_min_bytes
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, bucket_choices
from memwall.planning.techniques.parameters import as_streamed
from memwall.predict.cuda.live_cuda import with_library_workspaces, workspaces_here
from memwall.predict.first_step import FirstStep
from memwall.predict.live_device import live_process
from memwall.predict.process import calibrated, parked_bytes
from memwall.predict.state_on_disk import as_stepped_at_once, state_sizes, with_state_on_disk
from memwall.predict.treatment import StepModel
from memwall.session.device_budget import DeviceBudget
from memwall.session.loop.left_out_blocks import LeftOutBlocks
from memwall.session.measurements import standing_bytes
from memwall.torch_internals.autograd import current_node
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.optimizers import joint_name
from memwall.trace.records import Trace
from memwall.trace.saved_tensors import Parking
from memwall.trace.together import models_of
from memwall.trace.trace_builder import TraceBuilder

# Looked at whenever a tensor is saved or asked for, a process grows by so much between two looks, outside the heap: by
# what an operator's library takes for itself, say. Two margins, which a budget that is told has, are more than that.
_BETWEEN_LOOKS_BYTES = 24 << 20

_log = logging.getLogger(__name__)


class RecordedStep:
    """Records from its construction, within the model's first forward or before it, until `finish` or `stop`.

    Args:
        disk_capacity_bytes: the most to take of the disk; None for what is free there.
        host_limit_bytes: of a model on CUDA, the most host memory to use, now and by plans.
        called: the model that is being called, of those that are trained together; None where the step begins before.
        begins_step: see `StepRecorder`.

    Raises:
        StoreError: the disk cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        settings: Settings,
        allocator: AllocatorHandler,
        keeper: StateKeeper,
        parameters: ParameterKeeper,
        device_budget: DeviceBudget,
        disk_capacity_bytes: int | None = None,
        host_limit_bytes: int | None = None,
        called: nn.Module | None = None,
        begins_step: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        self._called, self._begins_step, self._host_limit_bytes = called, begins_step, host_limit_bytes
        self._model, self._settings, self._allocator = model, settings, allocator
        self._keeper, self._parameters, self._device_budget = keeper, parameters, device_budget
        self._began_streamed = parameters.away_bytes > 0
        self._peak_before_optimizer_bytes = 0
        self._allocated_before_optimizer_bytes: int | None = None
        self.moved_bytes = 0
        """Saved tensors that left the device; known once the recording has ended."""
        self.input_shapes: tuple[tuple[int, ...], ...] = ()
        """Those of all tensors that the model was called with first; known once the recording has ended."""
        self.differentiates_backward = False
        """Whether a backward of the step made a graph of itself (`create_graph=True`), as gradient penalties do."""
        self._builder: TraceBuilder | None = None
        self._left_out = LeftOutBlocks()
        self._parked: Parked | None = None
        device_budget.hold(meter_of(model), settings.budget_bytes)
        device_budget.begin_recording()
        try:
            self._parked = Parked(
                [model],
                disk=settings.disk,
                capacity_bytes=disk_capacity_bytes,
                window_bytes=WINDOW_BYTES,
                min_bytes=recorded_min_bytes(self._device.type),
                host_limit_bytes=host_limit_bytes,
                no_disk=settings.no_disk,
            )
            self._machine = self._parked.machine
            device_budget.hold(meter_of(model), settings.budget_bytes)  # which may have given way to what was measured
            for _, handler in allowed(settings.allow):
                self._machine = handler.measured(self._machine)
            self._start(optimizers)
        except BaseException:
            self.stop()
            raise

    def _start(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        assert self._parked is not None
        if self._is_on_cpu:
            limit_bytes = self._settings.budget_bytes
            self._allocator.trim(generation=1)  # what is free already does not count as there
            self._allocator.apply_tight(limit_bytes and max(limit_bytes - _BETWEEN_LOOKS_BYTES, 1), WINDOW_BYTES)
        self._builder = TraceBuilder(
            [self._model],
            _UnderLimit(self._parked.engine, self._allocator, self._device_budget, self._unpacks),
            workspaces=workspaces_here(self._device),
        )
        # To look at parameters does not bring them in.
        with self._keeper.shown(), without_subclass_functions():
            self._builder.start_step(
                optimizers,
                running_root=self._called,
                begins_step=self._begins_step,
                find_optimizers=lambda: find_optimizers(self._model, objects_of((torch.optim.Optimizer,))),
            )
        self._parameters.follow(self._builder.stands_for)
        if any(optimizer.state for optimizer in optimizers):
            # The step needs room for gradients and for moving tensors, beside the state that is there.
            gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
            self._spill(optimizers, coming_bytes=gradients + WINDOW_BYTES)

    @property
    def failure(self) -> MemwallError | None:
        """Returns what failed in a transfer of saved tensors inside autograd, where no hook sees the error pass."""
        return self._parked.engine.failure if self._parked is not None else None

    @property
    def is_changed_by_hand(self) -> bool:
        """Returns whether the loop itself has changed parameters after a backward."""
        return self._builder is not None and self._builder.is_changed_by_hand

    @property
    def is_dry_run(self) -> bool:
        """Returns whether the step has run forwards alone, of which nothing is left."""
        return self._builder is not None and self._builder.is_dry_run

    def unseen(self) -> AbstractContextManager[None]:
        """Has what runs be no part of the step; what autograd saves goes where it does in the step."""
        assert self._builder is not None
        return self._builder.unseen()

    def before_optimizer(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Moves what has no room; to be called before each optimizer's step, with those that are known by then."""
        self._left_out.optimizer_begins(self._model)
        if not self._peak_before_optimizer_bytes:
            meter = meter_of(self._model)
            self._peak_before_optimizer_bytes, allocator = meter.peak_bytes(), meter.allocator_peak()
            self._allocated_before_optimizer_bytes = None if allocator is None else allocator.allocated_bytes
            self._allocator.look_outside()
        self._spill(optimizers)
        if self._parameters.away_bytes and not self._keeper.is_away:
            # Nothing else steps a few of them at a time.
            reason = f"the state of {joint_name(optimizers)} stays in memory"
            self._parameters.bring_back_within(self._model, self._settings.budget_bytes, reason)

    def finish(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Trace, FirstStep]:
        """Ends the recording.

        Returns:
            The trace, and what the step needed and would need under another budget.

        Raises:
            TraceError: it was no whole step.
        """
        assert self._parked is not None
        assert self._builder is not None
        builder, allocator = self._builder, meter_of(self._model).allocator_peak()
        if not self._keeper.is_away:  # what takes state to disk passes outside the heap as well, and is no workspace
            self._allocator.look_outside()
        kept_bytes = self._allocator.kept_bytes()
        self._allocator.trim()  # first: the records of a step of many operations take memory outside the heap
        with self._keeper.shown():
            step = builder.finish_step(optimizers)
        self.input_shapes = builder.input_shapes
        window_bytes, min_bytes = self._parked.engine.staging_bytes, self._parked.min_bytes
        self.stop()
        self._allocator.trim(generation=1)
        is_streamed = self._parameters.away_bytes > 0
        # Parameters that came from disk for their module lay outside the heap, too.
        outside_bytes = None if is_streamed else self._allocator.passing_outside_bytes()
        precisions = (technique_of(action).precision(action) for action in self._settings.standing)
        precision = next((one for one in precisions if one is not None), None)
        trace = builder.trace(optimizers, machine=self._machine, autocast=precision or "none")
        if self._device.type == "cuda":
            trace = with_library_workspaces(trace, self._device)
        with without_subclass_functions():
            others_bytes = self._parameters.others_absent_bytes
            absent_bytes = self._parameters.absent_bytes + others_bytes
            present_bytes = standing_bytes(self._model, optimizers, trace) - absent_bytes
        modules = trace.modules
        away_min_bytes = MIN_STATE_BYTES if self._keeper.is_away else None
        allocated_bytes = None if allocator is None else allocator.allocated_bytes
        if self._keeper.is_away:
            allocated_bytes = self._allocated_before_optimizer_bytes
        trace = calibrated(
            trace,
            base_bytes=meter_of(self._model).base_bytes(present_bytes),
            window_bytes=window_bytes,
            min_bytes=min_bytes,
            away_min_bytes=away_min_bytes,
            peak_before_optimizer_bytes=self._peak_before_optimizer_bytes,
            outside_bytes=outside_bytes,
            kept_bytes=kept_bytes,
            absent_bytes=others_bytes,
            read_ahead_bytes=WINDOW_BYTES if self._device.type == "cuda" else 0,
            allocated_bytes=allocated_bytes,
            as_run=(lambda plain: as_streamed(plain, modules)) if is_streamed else (lambda plain: plain),
        )
        in_memory_bytes = 0
        if is_streamed:
            tensor_bytes = parked_bytes(trace, step, min_bytes=min_bytes, away_min_bytes=away_min_bytes, kept_bytes=0)
            in_memory_bytes = trace.base_bytes + trace.workspace_bytes + window_bytes + tensor_bytes
            # What is forecast of the step that ran ends before its optimizer, which had a few of them in memory.
            parameters = [(2 if one.requires_grad else 1) * one.nbytes for one in self._model.parameters()]
            inputs = [one.nbytes for one in step.storages if one.category == "input"]
            at_optimizer_bytes = trace.base_bytes + sum(parameters) + sum(inputs) + stepping_bytes(optimizers)
            in_memory_bytes = max(in_memory_bytes, at_optimizer_bytes)
        if self._device.type == "cuda":
            # Sums of gradients stay tensors of their own: the first steps under a plan are watched like the recorded
            # one, as are those after which memory was short, and what they take stays in segments.
            if self._keeper.is_away:
                (optimizer,) = optimizers  # of several none leaves a device in a step that is recorded
                sizes = [p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                whole = (as_stepped_at_once(s, trace.names, sizes) for s in trace.steps)
                trace = msgspec.structs.replace(trace, steps=tuple(whole))
            if self._began_streamed:  # beside tensors there is what the allocator has cut off and cannot use
                on_device_bytes = _on_device_bytes(trace, min_bytes, moves_state=self._keeper.is_away)
                # Where they had to come back before the optimizer ran, that was measured.
                ran_bytes = 0 if is_streamed else step.process_peak_bytes
                in_memory_bytes = max(in_memory_bytes, on_device_bytes, ran_bytes)
        with self._keeper.shown():
            planned_for = self._left_out.whole(
                trace, builder.table, optimizers, draws_in_python=builder.draws_in_python
            )
        more_bytes = 0
        if planned_for is not trace:
            recorded_bytes, whole_bytes = (
                parked_bytes(one, one.steps[0], min_bytes=min_bytes, away_min_bytes=away_min_bytes, kept_bytes=0)
                for one in (trace, planned_for)
            )
            more_bytes = max(0, whole_bytes - recorded_bytes)
        return planned_for, FirstStep(
            needed_bytes=step.process_peak_bytes - (kept_bytes or 0),
            in_memory_bytes=in_memory_bytes + (more_bytes if in_memory_bytes else 0),
            left_out_bytes=0 if is_streamed else more_bytes,
            stays_from_bytes=self._parameters.stays_from_bytes,
            others_bytes=others_bytes,
            built_from_bytes=self._parameters.built_from_bytes if others_bytes else 0,
        )

    def _unpacks(self) -> None:
        self.differentiates_backward |= torch.is_grad_enabled()  # in which autograd runs a backward for its own graph

    def stop(self) -> None:
        """Takes the recording away. Safe to call twice."""
        self._parameters.follow(None)
        if self._builder is not None:
            self._builder.cancel_step()
            self._builder = None
        self._device_budget.end_recording()
        if self._parked is not None:
            if self._parked.engine.refusal:
                _log.warning("in the first step saved tensors stay on the device: %s", self._parked.engine.refusal)
            self.moved_bytes = self._parked.close()
            self._parked = None

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    @property
    def _is_on_cpu(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self._model.parameters())

    def _steps_alone(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Tells whether there is one optimizer, which leaves no gradient to another that has not shown itself yet."""
        if len(optimizers) != 1:
            return False
        own = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
        models = models_of(self._model)
        if len(models) > 1 and not all(any(id(p) in own for p in model.parameters()) for model in models):
            return False
        in_backward = current_node() is not None  # other gradients are still to come, to optimizers of their own
        return all(
            id(p) in own for p in self._model.parameters() if _may_be_stepped(p) or (in_backward and p.requires_grad)
        )

    def _spill(self, optimizers: Sequence[torch.optim.Optimizer], coming_bytes: int = 0) -> None:
        can_leave = self._is_on_cpu or (self._host_limit_bytes and num_processes() == 1)  # shards lie in parts
        if not can_leave or not optimizers:
            return
        # What parameters leave memory for steps them all; a device has room for one step's temporaries, and in the
        # backward it is not known how many are to come.
        needs_one = self._parameters.away_bytes > 0 or not self._is_on_cpu or current_node() is not None
        if not can_place(optimizers) or (needs_one and not self._steps_alone(optimizers)):
            if self._keeper.is_away:
                self._keeper.bring_back()  # one that came later has to keep its own in memory
            return
        used_bytes = self._parked.engine.bytes_written if self._parked is not None else 0
        self._keeper.spill_recorded(
            optimizers,
            self._allocator,
            budget_bytes=self._settings.budget_bytes,
            coming_bytes=coming_bytes,
            used_bytes=used_bytes,
            host_limit_bytes=max(0, (self._host_limit_bytes or 0) - used_bytes),
            must=self._parameters.away_bytes > 0,
        )


def _on_device_bytes(trace: Trace, min_bytes: int, *, moves_state: bool) -> int:
    """Returns what a recorded step holds with parameters and gradients on the device, and its state below it or not."""
    step = trace.steps[0]
    if moves_state:
        bucket_bytes, _ = bucket_choices(state_sizes(step, MIN_STATE_BYTES))
        step = with_state_on_disk(step, resident_bytes=0, bucket_bytes=bucket_bytes, min_bytes=MIN_STATE_BYTES)
    parked = StepModel(step, trace.names, ()).parked(min_bytes, read_ahead_bytes=WINDOW_BYTES)
    return live_process(trace).free(parked).process_bytes


def _may_be_stepped(parameter: nn.Parameter) -> bool:
    """Tells whether an optimizer has something to do with it, in this step or, on disk, in a later one."""
    return parameter.grad is not None or (is_streamed(parameter) and parameter.requires_grad)


class _UnderLimit:
    """Parks saved tensors, and leaves tensors less as the process grows beside them: no plan has said by how much.

    Saved tensors come by all through forward and backward.
    """

    def __init__(
        self, parking: Parking, allocator: AllocatorHandler, device_budget: DeviceBudget, unpacks: Callable[[], None]
    ) -> None:
        self._parking, self._allocator, self._device_budget = parking, allocator, device_budget
        self._unpacks = unpacks

    def pack(self, tensor: Tensor, /) -> object:
        self._hold_limits()
        return self._parking.pack(tensor)

    def unpack(self, saved: Any, /) -> Tensor:
        self._unpacks()
        self._hold_limits()
        return self._parking.unpack(saved)

    def _hold_limits(self) -> None:
        self._allocator.look_outside()
        self._allocator.hold_limit()
        self._device_budget.look_beside()
