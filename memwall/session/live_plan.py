"""The plan of a running session: recorded for, made, applied, replaced, taken back."""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.cuda_setting import restore_variables
from memwall.apply.memory.ddp_buckets import when_rebuilt
from memwall.apply.memory.exhaustion import Exhaustion
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper, can_place, why_not_on_cpu
from memwall.apply.precision import LowerPrecision, lower_dtype
from memwall.apply.streaming.parameter_keeper import ParameterKeeper, why_not_streamed
from memwall.apply.technique import handler_of
from memwall.errors import ApplyError, InfeasibleError, MemwallError
from memwall.machine.limits import pinnable_bytes
from memwall.patches import undo_all
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of, techniques
from memwall.planning.techniques.autocast import can_autocast
from memwall.session.measurements import Measurements
from memwall.session.recorded_kernels import RecordedKernels
from memwall.session.recorded_step import RecordedStep
from memwall.session.replanning import MAX_REPLANS, planned, planned_after, planned_again
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

__all__ = ["LivePlan"]

_log = logging.getLogger(__name__)


class LivePlan:
    """See the module. A session tells it when; every method is to be called between two steps.

    Args:
        settings: what the user asked for.
        plan: one that was given; None where it is to be made from a recorded step.
        measured: where moved bytes and planning are counted.
        on_plan: called when a plan stands, before it is applied.
        set_by_loop: tags of actions that the training loop carries out itself.
        disk_capacity_bytes: the most to take of the disk below a CPU's memory; None for what is free there.
        host_capacity_bytes: the most host memory to take below a CUDA device; None for what can be pinned.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan | None,
        *,
        measured: Measurements,
        on_plan: Callable[[], None],
        set_by_loop: tuple[str, ...],
        disk_capacity_bytes: int | None = None,
        host_capacity_bytes: int | None = None,
    ) -> None:
        self.settings, self.plan = settings, plan
        self.budget_bytes = settings.budget_bytes
        """What was asked for; settings have less once it turned out that less is there."""
        self.trace: Trace | None = None
        self.is_given = plan is not None
        self.is_cooperative = False
        """Whether the loop takes its micro-batches from the session."""
        self.allocator = AllocatorHandler()
        self.parameters = ParameterKeeper(settings.disk, disk_capacity_bytes)
        self.keeper = StateKeeper(settings.disk, disk_capacity_bytes, self.parameters.around_step)
        self.micro = MicroBatches()
        self.recorded: RecordedStep | None = None
        self.applied: AppliedPlan | None = None
        self._measured, self._on_plan, self._set_by_loop = measured, on_plan, set_by_loop
        self._bucket_hooks: tuple[RemovableHandle, ...] = ()
        self._undo_autocast: Callable[[], None] | None = None
        self._kernels = RecordedKernels()
        self._disk_capacity_bytes, self._host_capacity_bytes = disk_capacity_bytes, host_capacity_bytes
        self._host_limit_bytes: int | None = None
        """Host memory below a model on CUDA: what plans are made with is what they are applied with."""

    @property
    def failure(self) -> MemwallError | None:
        """What failed where no hook of the session sees the error pass: a transfer in autograd, an action's effect."""
        applied = () if self.applied is None else (self.applied.engine, self.applied.effects)
        parts = (self.recorded, *applied, self.keeper, self.parameters)
        return next((part.failure for part in parts if part and part.failure), None)

    def watch_building(self) -> None:
        """Has parameters go to disk as they are made, where there is no room for them."""
        is_possible = not torch.cuda.is_available()
        if self.plan is not None:
            is_possible &= any(handler_of(action).can_be_built_away for action in self.plan.actions)
        if is_possible and self.settings.budget_bytes:
            self.parameters.watch_building(self.settings.budget_bytes, self.allocator)

    def lower_budget(self, within_bytes: int) -> None:
        """Plans for less than what was asked for: not all of it is there."""
        self.settings = msgspec.structs.replace(self.settings, budget_bytes=within_bytes)

    def take_batches_from(self, model: nn.Module | None) -> None:
        """Divides the batches that the loop hands over, from now on.

        Args:
            model: the one they are for, where its first forward is to come: a given plan is applied in there, too late
                for the batch that it is fed from.
        """
        self.is_cooperative = True
        if model is not None:
            self.micro.follow(model)
            given = self.plan.actions if self.plan is not None else ()
            self.micro.divide_into(next((p[0] for a in given if (p := technique_of(a).batch_parts(a))), None))

    # -- the recorded step -------------------------------------------------------------------------------------------

    def record(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begins to record the step whose first forward is about to be called.

        Raises:
            StoreError: the disk cannot be used.
        """
        is_streamed = self.parameters.spill_recorded(
            model, optimizers, self.allocator, budget_bytes=self.settings.budget_bytes
        )
        self._measured.note_peak()
        self._host_limit_bytes = self._host_limit_below(model)
        self._kernels.begin(model, self.settings.allow, is_streamed=is_streamed)
        self.recorded = RecordedStep(
            model,
            optimizers,
            settings=self.settings,
            allocator=self.allocator,
            keeper=self.keeper,
            parameters=self.parameters,
            disk_capacity_bytes=self._disk_capacity_bytes,
            host_limit_bytes=self._host_limit_bytes,
        )

    def stop_recording(self) -> None:
        """Takes the recording away, if there is one."""
        if self.recorded is not None:
            self.recorded.stop()
            self._measured.bytes_to_tier += self.recorded.moved_bytes
            self._measured.first_step_bytes_to_tier += self.recorded.moved_bytes + self._count_state_bytes()
            self.recorded = None

    def make(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, is_running: bool) -> bool:
        """Plans from the recorded step, and applies the plan.

        Args:
            is_running: whether the model's forward is being called right now, by a hook before it.

        Returns:
            False if the next step has to be recorded, in lower precision, which the user allowed: from observed bytes,
            not halved ones.

        Raises:
            InfeasibleError: nothing fits.
        """
        assert self.recorded is not None
        begin = time.perf_counter()
        self.trace, first = self.recorded.finish(optimizers)
        self.stop_recording()
        self._measured.note_peak()  # planning begins another one
        self._measured.note_first_step(self.trace.steps[0].process_peak_bytes)
        self.settings = msgspec.structs.replace(
            self.settings,
            kernels=self._kernels.found_in(self.trace),
            first_step=first if self.trace.device == "cpu" else None,
        )
        allow = self.settings.allow
        for technique in techniques():
            reason = technique.why_not(self.trace, allow) if technique.allow in allow else None
            if technique.allow == "cpu-optimizer-step" and technique.allow in allow:
                reason = reason or why_not_on_cpu(optimizers)
            if reason is not None:
                _log.warning("%s is allowed, but has no effect: %s", technique.allow, reason)
        try:
            self.trace, self.plan = planned(self.trace, self._present_settings(model, optimizers), self.allocator)
        except InfeasibleError:
            if can_autocast(self.trace, self.settings.allow) is not None:
                raise
            dtype = lower_dtype(self.trace.device)
            _log.info("no plan fits in the present precision; the next step is recorded under %s autocast", dtype)
            self.settings = msgspec.structs.replace(self.settings, autocast=dtype)
            self._undo_autocast = LowerPrecision(model, dtype, is_running=is_running).undo
            return False
        self._measured.plan_seconds = time.perf_counter() - begin
        self.apply(model, optimizers, is_running=is_running)
        return True

    # -- in effect ---------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, is_running: bool) -> None:
        """Applies the plan that stands.

        Raises:
            MemwallError: an action cannot be applied here.
        """
        assert self.plan is not None
        self._on_plan()
        # The plan's own actions take their place.
        self._end_autocast()
        self._kernels.end()
        if self._host_limit_bytes is None:  # the plan was given
            self._host_limit_bytes = self._host_limit_below(model)
        order = () if self.trace is None else tuple(b.path for b in find_blocks(self.trace, steady_step(self.trace)))
        applied = AppliedPlan(
            model,
            self.plan.actions,
            block_order=order,
            disk=self.settings.disk,
            disk_capacity_bytes=self._disk_capacity_bytes,
            allocator=self.allocator,
            micro=self.micro,
            is_cooperative=self.is_cooperative,
            is_running=is_running,
            set_by_loop=self._set_by_loop,
            optimizers=tuple(optimizers),
            keeper=self.keeper,
            parameters=self.parameters,
            host_limit_bytes=self._host_limit_bytes,
        )
        applied.apply()
        self._measured.first_step_bytes_to_tier += self._count_state_bytes()
        self.applied = applied
        self._bucket_hooks = when_rebuilt(model, self._buckets_rebuilt)
        self._measured.note_peak()
        self.allocator.trim()
        if self._host_limit_bytes is not None:
            # What the plan has taken off the device since the last step is torch's still, and counts as held.
            torch.cuda.empty_cache()
        self._measured.begin_plan(None if self.trace is None else self.trace.base_bytes)
        forecast = self.plan.forecast
        _log.info(
            "a plan with %d actions is applied; it foresees a peak of %s",
            len(self.plan.actions),
            format_bytes(forecast.peak.process_bytes),
        )

    def replace(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], excess_bytes: int) -> bool:
        """Charges what was measured beyond the forecast to the process, plans with that, and applies the plan.

        Returns:
            Whether that may be done once more.
        """
        assert self.trace is not None
        is_explained = self._note_not_recomputed()
        found = planned_again(
            self.trace, self._present_settings(model, optimizers), excess_bytes, is_explained=is_explained
        )
        if found is None:
            return False
        self._measured.num_replans += 1
        self._change_to(*found, model, optimizers, is_running=True)
        return self._measured.num_replans < MAX_REPLANS

    def replace_after(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], found: Exhaustion) -> bool:
        """Plans from a failure to get memory, and applies the plan.

        Returns:
            False if no plan needs less than the present one.
        """
        assert self.trace is not None
        assert self.plan is not None
        self._note_not_recomputed()
        self.allocator.trim()
        made = planned_after(self.trace, self._present_settings(model, optimizers), self.plan, found)
        if made is None:
            return False
        trace, settings, plan = made
        self.lower_budget(settings.budget_bytes)
        self._change_to(trace, plan, model, optimizers, is_running=False)
        return True

    def _change_to(
        self,
        trace: Trace,
        plan: Plan,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_running: bool,
    ) -> None:
        self.take_back(keeps_state=True)
        self.trace, self.plan = trace, plan
        self._measured.forget_steps()
        self.apply(model, optimizers, is_running=is_running)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, before its first step; what waited for that is applied.

        Raises:
            MemwallError: the plan cannot be applied to it.
        """
        if self.keeper.is_away:
            raise ApplyError(
                f"{type(optimizer).__name__} begins to step the model while another optimizer's state is on disk, and "
                "of several it stays in memory; have every optimizer step in the first step, hand all of them to "
                "memwall.fit(model, [first, second], budget=...), or give a larger budget"
            )
        if self.applied is not None:
            self.applied.add_optimizer(optimizer)

    def forget_plan(self) -> None:
        """The step that follows is recorded again, and planned from."""
        self.take_back()
        self.trace = self.plan = None
        self.settings = msgspec.structs.replace(self.settings, autocast=None)  # the plan's own has been taken back
        self._measured.forget_steps()

    def take_back(self, *, keeps_state: bool = False) -> None:
        """The model is as before.

        Args:
            keeps_state: leave the optimizer's state and the parameters where they are, for the plan that follows.
        """
        self._count_state_bytes()
        for hook in self._bucket_hooks:
            hook.remove()
        if self.applied is not None:
            out_bytes, in_bytes = self.applied.moved_bytes
            self._measured.bytes_to_tier += out_bytes
            self._measured.bytes_from_tier += in_bytes
            applied, self.applied = self.applied, None
            applied.undo(keeps_state=keeps_state)
        if not keeps_state:
            self.parameters.bring_back()
            self.keeper.bring_back()

    def check_effects(self) -> None:
        """To be called after each optimizer step; notes what the plan's actions did in it.

        Raises:
            NoEffectError: an action has none.
        """
        if self.applied is None:
            return
        self._measured.not_recomputed |= self.applied.not_recomputed
        self.applied.effects.check()

    def end_showing(self) -> None:
        """What was shown of parameters on disk, to save them, is no part of the step that follows."""
        shown_bytes = self.parameters.end_showing()
        if shown_bytes:
            self._measured.note_peak(shown_bytes)
            self._measured.meter.reset_peak()

    def end(self) -> None:
        """The process is as before, too."""
        undos = (self.allocator.undo, restore_variables, self.parameters.end_building, self._kernels.end)
        undo_all((*undos, self._end_autocast))

    def _note_not_recomputed(self) -> bool:
        """Has plans from now on recompute no block that was found not to repeat itself; whether one is new."""
        if self.applied is not None:
            self._measured.not_recomputed |= self.applied.not_recomputed
        known, present = self.settings.not_recomputed, tuple(sorted(self._measured.not_recomputed))
        self.settings = msgspec.structs.replace(self.settings, not_recomputed=present)
        return present != known

    def _buckets_rebuilt(self) -> None:
        """Those of the first step are free: what malloc keeps of them no forecast knows."""
        self.allocator.trim(generation=0)
        self.allocator.hold_limit()

    def _end_autocast(self) -> None:
        if self._undo_autocast is not None:
            self._undo_autocast()
            self._undo_autocast = None

    def _count_state_bytes(self) -> int:
        """Counts what of state and parameters was moved since the last time; returns the bytes written."""
        moved = (self.keeper.moved_bytes(), self.parameters.moved_bytes())
        out_bytes, in_bytes = (sum(counts) for counts in zip(*moved, strict=True))
        self._measured.bytes_to_tier += out_bytes
        self._measured.bytes_from_tier += in_bytes
        return out_bytes

    def _host_limit_below(self, model: nn.Module) -> int | None:
        """What may be taken of host memory, for a model on CUDA; None for others."""
        if all(parameter.device.type != "cuda" for parameter in model.parameters()):
            return None
        can_pin_bytes = pinnable_bytes()
        return can_pin_bytes if self._host_capacity_bytes is None else min(can_pin_bytes, self._host_capacity_bytes)

    def _present_settings(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Settings:
        """What the user asked for, and what of it this loop, its model and its optimizers allow."""
        settings = self.settings
        if "cpu-optimizer-step" in settings.allow and why_not_on_cpu(optimizers) is not None:
            allow = tuple(name for name in settings.allow if name != "cpu-optimizer-step")
            settings = msgspec.structs.replace(settings, allow=allow)
        is_above_host = self._host_limit_bytes is not None  # what the user said of the disk is not said of host memory
        return msgspec.structs.replace(
            settings,
            tier_capacity_bytes=self._host_limit_bytes if is_above_host else self._disk_capacity_bytes,
            allow_accumulation=self.is_cooperative,
            can_move_state=can_place(optimizers),
            is_built_on_disk=self.parameters.is_watching and self.parameters.away_bytes > 0,
            parameters_stay=why_not_streamed(model, optimizers) or "",
        )
