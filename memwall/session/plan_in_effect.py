"""Applies a plan to a model and its process, and knows what stands for it there: actions, tiers, the heap, limits."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.cuda_setting import restore_variables
from memwall.apply.memory.ddp_buckets import when_rebuilt
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.resharding import with_resharding_of_ranks
from memwall.apply.streaming.open_streaming import is_streamed
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import handler_of
from memwall.errors import MemwallError
from memwall.machine.limits import pinnable_bytes
from memwall.patches import undo_all
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.technique import technique_of
from memwall.predict.call_rules import paths_in_order
from memwall.session.device_budget import DeviceBudget
from memwall.session.measurements import Measurements
from memwall.session.step_borders import StepBorders
from memwall.session.watch.room import RoomBetweenSteps
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_NUM_COPIES = 2
"""Copies of the weights that there is room for between two steps: one in parts, and those joined into one."""
_CHEAP_SHARE = 0.01
"""Part of a step's time that faulting that room in anew may cost, whether or not it was used."""


class PlanInEffect:
    """Applies a plan, looks after it in each step, and takes it back; every method is to be called between two steps.

    Args:
        borders: knows the model and what steps it.
        measured: where moved bytes are counted.
        set_by_loop: tags of actions that the training loop carries out itself.
        disk: where bytes go that have no room in memory.
        disk_capacity_bytes: the most to take of the disk below a CPU's memory; None for what is free there.
        host_capacity_bytes: the most host memory to take below a CUDA device; None for what can be pinned.

    Attributes:
        disk: where bytes go that have no room in memory; None for the system's folder for such files.
        allocator: the heap that tensors on a CPU get.
        parameters: which parameters are on disk.
        keeper: where the optimizer's state is.
        micro: divides batches, where the loop hands them over.
        device_budget: holds torch's allocator to the budget on CUDA.
        applied: the plan's actions; None while there is no plan.
        num_changes: how often a plan was applied or taken back.
    """

    def __init__(
        self,
        borders: StepBorders,
        measured: Measurements,
        *,
        set_by_loop: tuple[str, ...],
        disk: str | None,
        disk_capacity_bytes: int | None,
        host_capacity_bytes: int | None,
    ) -> None:
        self._borders, self._measured, self._set_by_loop, self.disk = borders, measured, set_by_loop, disk
        self.disk_capacity_bytes, self._host_capacity_bytes = disk_capacity_bytes, host_capacity_bytes
        self.host_limit_bytes: int | None = None
        """Host memory below a model on CUDA: what plans are made with is what they are applied with."""
        self.allocator = AllocatorHandler()
        self.parameters = ParameterKeeper(disk, disk_capacity_bytes)
        measured.shown_bytes = lambda: self.parameters.shown_bytes
        self.keeper = StateKeeper(disk, disk_capacity_bytes, self.parameters.around_step)
        self.micro = MicroBatches()
        self._undo_resharding: Callable[[], None] = lambda: None
        self.is_cooperative = False
        """Whether the loop takes its micro-batches from the session."""
        self.device_budget = DeviceBudget()
        self.applied: AppliedPlan | None = None
        self.num_changes = 0
        self._bucket_hooks: tuple[RemovableHandle, ...] = ()
        self._room_bytes = 0
        self._sizes: set[int] = set()
        """Elements of each of the larger weights, and of all of them joined."""
        self._is_room_cheap = False

    @property
    def failure(self) -> MemwallError | None:
        """Returns what failed where no hook of the session sees it: in a transfer within autograd, in an effect."""
        applied = () if self.applied is None else (self.applied.engine, self.applied.effects)
        for part in (*applied, self.keeper, self.parameters):
            found: MemwallError | None = None if part is None else part.failure
            if found is not None:
                return found
        return None

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes of saved tensors that the plan's actions have moved to the next tier so far, and back."""
        return (0, 0) if self.applied is None else self.applied.moved_bytes

    def watch_building(self, plan: Plan | None, budget_bytes: int) -> None:
        """Has parameters leave as they are made, where there is no room for them.

        Args:
            plan: the one that was given.
        """
        is_possible = plan is None or any(handler_of(action).can_be_built_away for action in plan.actions)
        if is_possible and budget_bytes:
            host_limit = self._host_limit if torch.cuda.is_available() else None
            self.parameters.watch_building(budget_bytes, self.allocator, host_limit)

    def take_batches(self, plan: Plan | None, *, is_begun: bool) -> None:
        """Divides the batches that the loop hands over, from now on.

        Args:
            plan: the one that stands.
            is_begun: whether the run's first forward has been called. A given plan is applied in there, too late for
                the batch that it is fed from.
        """
        self.is_cooperative = True
        if not is_begun and self._borders.model is not None:
            self.micro.follow(self._borders.model)
            given = plan.actions if plan is not None else ()
            self.micro.divide_into(next((p[0] for a in given if (p := technique_of(a).batch_parts(a))), None))

    def measure_host(self) -> None:
        """Finds out what may be taken of host memory, for a model on CUDA."""
        if all(parameter.device.type != "cuda" for parameter in self._borders.attached_model.parameters()):
            self.host_limit_bytes = None
            return
        self.host_limit_bytes = self._host_limit()

    def _host_limit(self) -> int:
        """Returns what may be taken of host memory below a device, with what is there already."""
        told_bytes = self._host_capacity_bytes
        can_pin_bytes = pinnable_bytes(is_asked_for=told_bytes is not None) + self.parameters.pinned_bytes
        return can_pin_bytes if told_bytes is None else min(can_pin_bytes, told_bytes)

    def apply(self, plan: Plan, trace: Trace | None, budget_bytes: int) -> None:
        """Applies a plan.

        Args:
            trace: what it was made from; None where it was given.
            budget_bytes: the process bytes that the device is to be held to.

        Raises:
            MemwallError: an action cannot be applied here.
        """
        if self.host_limit_bytes is None:  # the plan was given
            self.measure_host()
        if self.host_limit_bytes is not None:
            # State that comes back is to lie in segments of its own, as forecast: not in parts of what a step has left.
            torch.cuda.empty_cache()
        blocks = () if trace is None else find_blocks(trace, steady_step(trace))
        applied = AppliedPlan(
            self._borders.attached_model,
            plan.actions,
            block_order=paths_in_order(blocks),
            disk=self.disk,
            disk_capacity_bytes=self.disk_capacity_bytes,
            allocator=self.allocator,
            micro=self.micro,
            is_cooperative=self.is_cooperative,
            is_running=self._borders.in_first_forward,
            is_stepping=self._borders.in_optimizer,
            set_by_loop=self._set_by_loop,
            optimizers=self._borders.optimizers,
            keeper=self.keeper,
            parameters=self.parameters,
            host_limit_bytes=self.host_limit_bytes,
        )
        applied.apply()
        self.count_state(is_recorded=True)
        self.applied = applied
        self._undo_resharding = with_resharding_of_ranks(self._borders.attached_model, plan)
        self.num_changes += 1
        with without_subclass_functions():  # what is on disk is shown by memwall itself
            parameters = [p for p in self._borders.attached_model.parameters() if p.device.type == "cpu"]
            # One that is on disk is shown in memory to whoever reads it.
            self._room_bytes = sum(local_part(p).nbytes * (_NUM_COPIES + is_streamed(p)) for p in parameters)
            sizes = [p.numel() for p in parameters]
            # Small ones need little room, and what a loop reads after each step, as its actions, may be as small.
            self._sizes = {sum(sizes), *(size for size in sizes if 4 * size >= max(sizes))}
        seconds = plan.forecast.step_seconds
        fault_seconds = 0.0 if trace is None else self._room_bytes * trace.machine.heap_fault_seconds_per_byte
        self._is_room_cheap = trace is not None and bool(seconds) and fault_seconds <= _CHEAP_SHARE * (seconds or 0.0)
        self._bucket_hooks = when_rebuilt(self._borders.attached_model, self._buckets_rebuilt)
        self._measured.note_peak()
        self.allocator.trim()
        if self.host_limit_bytes is not None:
            # What the plan has taken off the device since the last step is torch's still, and counts as held.
            torch.cuda.empty_cache()
            self.device_budget.hold(self._measured.meter, budget_bytes)
        self._measured.begin_plan(None if trace is None else trace.base_bytes)
        _log.info(
            "a plan with %d actions is applied; it foresees a peak of %s",
            len(plan.actions),
            format_bytes(plan.forecast.peak.process_bytes),
        )

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, before its first step; what waited for that is applied.

        It takes the place of one whose state is on disk, and stays there, where it trains all that that one did; and of
        one of its kind that only memwall still holds, as where a loop makes a new one for each round.

        Raises:
            MemwallError: the plan cannot be applied to it.
        """
        if self.applied is None:
            return  # what is recorded moves the state of all, or of none
        if self.keeper.is_away and self.applied.can_replace(optimizer):
            self.applied.optimizers = ()  # nobody here holds the one before, which a script may have dropped
            self._borders.replace_optimizers(optimizer)
            self.keeper.turn_to(optimizer)
        elif self.keeper.is_away:
            self.applied.optimizers = ()
            self.keeper.lay_to_rest()
            self._borders.let_go_optimizers(in_cycles=True)
            self.applied.optimizers = tuple(one for one in self._borders.optimizers if one is not optimizer)
            self.keeper.take_up(self._borders.optimizers)
        elif self.applied.is_alike(optimizer):
            self.applied.optimizers = ()
            self._borders.let_go_optimizers()
            self.applied.optimizers = tuple(one for one in self._borders.optimizers if one is not optimizer)
        self.applied.add_optimizer(optimizer)

    def take_back(self, *, keeps_state: bool = False) -> None:
        """Leaves the model as it was before.

        Args:
            keeps_state: leave the optimizer's state and the parameters where they are, for the plan that follows.
        """
        self.count_state()
        for hook in self._bucket_hooks:
            hook.remove()
        undos: list[Callable[[], None]] = [] if keeps_state else [self.keeper.bring_back]
        undos.append(self._undo_resharding)
        self._undo_resharding = lambda: None
        if self.applied is not None:
            self._measured.count_moved(*self.applied.moved_bytes)
            applied, self.applied = self.applied, None
            self.num_changes += 1
            undos.append(partial(applied.undo, keeps_state=keeps_state))
        # Parameters come first, as they were there before any state: what that has no room for stays with the host.
        undo_all(undos if keeps_state else [*undos, self.parameters.bring_back])

    def check_effects(self) -> None:
        """Notes what the plan's actions did in a step; to be called after each optimizer step.

        Raises:
            NoEffectError: an action has none.
        """
        if self.applied is not None and self.applied.handlers:
            self._measured.lost |= self.applied.lost
            self.applied.check_effects()

    def check_proofs(self) -> None:
        """Checks that no action has changed the gradients; to be called before an optimizer uses them.

        Raises:
            NotExactError: one has.
        """
        if self.applied is not None and self.applied.handlers:
            self.applied.check_proofs()

    def leave_room(self, room: RoomBetweenSteps) -> None:
        """Leaves room after a step for copies of the weights: scripts log, hash or keep them where no hook sees it."""
        if self.applied is not None and self._room_bytes and self.allocator.is_limited:
            room_bytes = room.after_step(self._room_bytes, is_cheap=self._is_room_cheap)
            if room_bytes:
                self.allocator.leave_room(room_bytes)
            room.begin_looking()

    def leave_room_beside(self, tensor: Tensor) -> None:
        """Leaves room for copies of the weights where one of them, or a copy of it, is read outside of a step."""
        if self.applied is not None and tensor.numel() in self._sizes:
            self.allocator.leave_room(self._room_bytes)

    def leave_room_in_step(self) -> None:
        """Leaves that room in the step that begins already: of one that no optimizer ends nobody hears the end."""
        if self.applied is not None and self._is_room_cheap:
            self.allocator.hold_limit(self._room_bytes)

    def end_showing(self) -> None:
        """Ends what was shown of parameters on disk, to save them: it is no part of the step that follows."""
        if not self.parameters.is_open:
            return
        with self._measured.showing:
            is_shown = self.parameters.shown_bytes > 0
            if is_shown:
                self._measured.note_peak()
            self.parameters.end_showing()
            if is_shown:
                self._measured.meter.reset_peak()

    def count_state(self, *, is_recorded: bool = False) -> None:
        """Counts what of state and parameters was moved since the last time."""
        for counts in (self.keeper.moved_bytes(), self.parameters.moved_bytes()):
            self._measured.count_moved(*counts, is_recorded=is_recorded)

    def end(self) -> None:
        """Leaves the process as it was before, too."""
        ends = (self.allocator.undo, restore_variables, self.parameters.end_building)
        undo_all((*ends, self.device_budget.lift))

    def _buckets_rebuilt(self) -> None:
        """Lets go of the buckets of the first step, which are free: what malloc keeps of them no forecast knows."""
        self.allocator.trim(generation=0)
        self.allocator.hold_limit()
