"""A training run under a budget: records the first step, plans, applies the plan before the second, measures on.

    waiting --first forward--> recording --first forward after an optimizer step--> running

The first step runs under the safest plan there is: every large saved tensor leaves the device, and free memory goes
back to the system before the budget is passed. It is a full training step; nothing is thrown away.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import msgspec
import torch
from torch import Tensor, nn

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.applied import AppliedPlan
from memwall.apply.measurements import Measurements, standing_bytes
from memwall.apply.microbatch import MicroBatches, shifts_labels
from memwall.apply.parking import Parked
from memwall.apply.planning import MAX_REPLANS, check_plan_is_for, excess_bytes, planned, planned_again
from memwall.apply.precision import LowerPrecision, lower_dtype
from memwall.errors import ApplyError, InfeasibleError, MemwallError, PlanError, UsageError
from memwall.plan.actions import Accumulate, AllocatorReuse
from memwall.plan.blocks import find_blocks
from memwall.plan.legality import can_autocast
from memwall.plan.planfile import Plan
from memwall.plan.search import MIN_MOVED_BYTES, WINDOW_BYTES, Settings, steady_step
from memwall.predict.process import calibrated
from memwall.trace.meter import process_bytes, process_peak_bytes, reset_process_peak
from memwall.trace.record import TraceBuilder
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = ["Session"]

_log = logging.getLogger(__name__)


class Session:
    """See `memwall.fit`. One model and one optimizer; a context manager that takes everything back when it ends."""

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        disk_capacity_bytes: int | None = None,
        allow: Sequence[str] = (),
        set_by_loop: tuple[type, ...] = (),
    ) -> None:
        """See `memwall.fit`.

        Args:
            set_by_loop: records of actions that the training loop itself carries out, by arguments of its own; of a
                given plan they are not applied a second time.
        """
        if (budget_bytes is None) == (plan is None):
            raise UsageError("give either a budget or a plan, not both and not neither")
        if plan is not None and plan.forecast.device.startswith("cuda") and not torch.cuda.is_available():
            raise PlanError(
                f"the plan is for device {plan.forecast.device}, and torch finds no CUDA device here; run it on a "
                "machine with one, or make a plan from a trace recorded on this machine with `memwall profile`"
            )
        self._settings = Settings(
            budget_bytes=budget_bytes if budget_bytes is not None else (plan.forecast.budget_bytes or 0) if plan else 0,
            disk=disk,
            disk_capacity_bytes=disk_capacity_bytes,
            allow=tuple(allow),
        )
        self.state: Literal["waiting", "recording", "running", "closed"] = "waiting"
        self.plan: Plan | None = plan
        self.trace: Trace | None = None
        self.measured = Measurements()
        self.on_plan: Callable[[Session], None] | None = None
        """Called when a plan stands, before it is applied: the place to show it, or to object."""
        self.failure: MemwallError | None = None
        """What ended the run; raised again at each further forward, should the loop have caught it."""
        self._given_plan = plan is not None
        self._set_by_loop = set_by_loop
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._builder: TraceBuilder | None = None
        self._parked: Parked | None = None
        self._applied: AppliedPlan | None = None
        self._allocator = AllocatorHandler()
        self._undo_autocast: Callable[[], None] | None = None
        self._is_cooperative = False
        self._micro = MicroBatches()
        self._step_begin = 0.0
        self._has_stepped = False
        self._in_step = False
        self._in_forward = False
        self._excess_bytes = 0
        """By how much the last step under the plan exceeded what the plan promised, the budget being near."""
        self._can_plan_again = True

    # -- life cycle ------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Says which model and optimizer this session trains. The optimizer may follow at its first step."""
        if self._model is not None:
            raise ApplyError("this session already trains a model; use one session for each")
        if self.plan is not None:
            check_plan_is_for(self.plan, model)
        self._model, self._optimizer = model, optimizer
        self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close(completed=failure[0] is None)

    def close(self, *, completed: bool = True) -> None:
        """Ends the session: the model and the process are as before. A first step that was alone is still planned."""
        if self.state == "closed":
            return
        self._note_engine_failure()
        self._note_peak()
        try:
            if completed and self.failure is None and self.state == "recording" and self._has_stepped:
                self._finish_recording()
        finally:
            self._stop_recording()
            self._take_back()
            if self._undo_autocast is not None:
                self._undo_autocast()
                self._undo_autocast = None
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._allocator.undo()
            self.state = "closed"

    def _take_back(self) -> None:
        if self._applied is not None:
            out_bytes, in_bytes = self._applied.moved_bytes
            self.measured.bytes_to_tier += out_bytes
            self.measured.bytes_from_tier += in_bytes
            self._applied.undo()
            self._applied = None

    # -- micro-batches, for loops that cooperate --------------------------------------------------------------------

    def step(self, batch: Any, *, count: Callable[[Any], int] | None = None) -> Iterator[Any]:
        """Yields the micro-batches of a batch; their losses, through `backward`, weigh as the undivided batch would.

        Example::

            for micro in session.step(batch):
                session.backward(loss_of(model, micro))
            optimizer.step()

        Args:
            batch: a tensor, or a tuple, list or dict of tensors with the samples in the first dimension.
            count: loss terms in a batch, where the loss is a mean over something else than samples: by default
                labels other than -100 if the batch has any, else samples. Of labels [samples, positions] the first
                position does not count, as for causal language models, unless transformers knows the model as another
                kind.
        """
        self._is_cooperative = True
        if self.state == "waiting" and self._model is not None:
            self._micro.shifts_labels = shifts_labels(self._model)
            # A given plan is applied in the first forward: too late for the batch that it is fed from.
            given = self.plan.actions if self.plan is not None else ()
            self._micro.micro_batch = next((a.micro_batch for a in given if isinstance(a, Accumulate)), None)
        yield from self._micro.split(batch, count)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, weighted by the present micro-batch's share of the batch."""
        self._micro.backward(loss)

    def first_forward(self, model: nn.Module) -> None:
        """Begins the run from within the model's first forward, whose hooks were already collected."""
        self._before_forward(model, (), {})

    def end_step(self) -> None:
        """Says that the optimizer has stepped and gradients are dropped: what runs next is no part of the step.

        Without it the step ends at the next forward, be that of the next step or of an evaluation.

        Raises:
            InfeasibleError: the step was the recorded one, and nothing fits.
        """
        if self.state == "recording" and self._has_stepped:
            self._finish_recording()

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_autograd_node() is not None:
            return
        self._note_engine_failure()
        if self.failure is not None:
            raise self.failure.without_frames()
        try:
            self._enter_forward(args, kwargs)
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def _enter_forward(self, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self.end_step()  # an evaluation: it must not be recorded as if every step had one
            return
        if self._in_step and not self._has_stepped:
            return  # a further micro-batch of the same step
        self._in_forward = True
        try:
            self.end_step()
            if self.state == "waiting":
                self._begin_run()
            if self._excess_bytes:
                self._plan_again()
        finally:
            self._in_forward = False
        self._begin_step(args, kwargs)

    def _begin_run(self) -> None:
        assert self._model is not None
        self._note_peak()
        if self._given_plan:
            assert self.plan is not None
            if self.on_plan is not None:
                self.on_plan(self)
            self._apply(self.plan)
            return
        self._parked = Parked(
            [self._model],
            disk=self._settings.disk,
            capacity_bytes=self._settings.disk_capacity_bytes,
            window_bytes=WINDOW_BYTES,
            min_bytes=MIN_MOVED_BYTES,
        )
        self._allocator.apply_tight(self._settings.budget_bytes, WINDOW_BYTES)
        self._builder = TraceBuilder([self._model], self._parked.engine)
        self._builder.start_step(self._optimizer, running_root=self._model)
        self.state = "recording"

    def _begin_step(self, args: Any, kwargs: Any) -> None:
        self._in_step, self._has_stepped = True, False
        if self.state == "running":
            # What ran since the last step, an evaluation say, is the run's peak, but not the step's.
            self._note_peak()
            self._can_plan_again &= reset_process_peak()
        if self._applied is not None:
            self._applied.begin_step()
        self._step_begin = time.perf_counter()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_step:
            return
        self._has_stepped, self._in_step = True, False
        self.measured.num_steps += 1
        peak_bytes = process_peak_bytes()
        self.measured.overall_peak_bytes = max(self.measured.overall_peak_bytes, peak_bytes)
        if self.state == "running":
            self.measured.step_seconds.append(time.perf_counter() - self._step_begin)
            self.measured.peak_bytes = max(self.measured.peak_bytes, peak_bytes)
            if self.plan is not None and self.trace is not None and self._can_plan_again:
                self._excess_bytes = excess_bytes(self.plan, peak_bytes)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says which optimizer trains the model, once it shows itself."""
        if self._optimizer is None:
            self._optimizer = optimizer
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    def _note_peak(self) -> None:
        """To be called before every reset of the process's peak, and at the end."""
        self.measured.overall_peak_bytes = max(self.measured.overall_peak_bytes, process_peak_bytes())

    # -- from recording to running -----------------------------------------------------------------------------------

    def _note_engine_failure(self) -> None:
        """A transfer fails inside autograd, where no hook of the session sees the error pass."""
        for engine in (self._parked and self._parked.engine, self._applied and self._applied.engine):
            if engine and self.failure is None:
                self.failure = engine.failure

    def _stop_recording(self) -> None:
        if self._builder is not None:
            self._builder.cancel_step()
            self._builder = None
        if self._parked is not None:
            moved_bytes = self._parked.close()
            self.measured.bytes_to_tier += moved_bytes
            self.measured.first_step_bytes_to_tier += moved_bytes
            self._parked = None

    def _finish_recording(self) -> None:
        try:
            self._plan_recorded()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise
        finally:
            self._stop_recording()

    def _plan_recorded(self) -> None:
        assert self._builder is not None
        assert self._parked is not None
        assert self._model is not None
        begin = time.perf_counter()
        builder, machine = self._builder, self._parked.machine
        step = builder.finish_step(self._optimizer)
        window_bytes = self._parked.engine.staging_bytes
        self._stop_recording()
        self.measured.first_step_peak_bytes = max(self.measured.first_step_peak_bytes, step.process_peak_bytes)
        self.measured.overall_peak_bytes = max(self.measured.overall_peak_bytes, step.process_peak_bytes)
        self._allocator.trim()
        trace = builder.trace(self._optimizer, machine=machine, autocast=self._settings.autocast or "none")
        self.trace = calibrated(
            trace,
            resident_bytes=process_bytes(),
            standing_bytes=standing_bytes(self._model, self._optimizer, trace),
            window_bytes=window_bytes,
            min_bytes=MIN_MOVED_BYTES,
        )
        settings = msgspec.structs.replace(self._settings, allow_accumulation=self._is_cooperative)
        try:
            self.trace, self.plan = planned(self.trace, settings, self._allocator)
        except InfeasibleError:
            if can_autocast(self.trace, self._settings.allow) is not None:
                raise
            self._record_again_under_autocast()
            return
        self.measured.plan_seconds = time.perf_counter() - begin
        if self.on_plan is not None:
            self.on_plan(self)
        self._apply(self.plan)

    def _plan_again(self) -> None:
        """Between two steps: charges what was measured beyond the forecast to the process, and plans with that."""
        assert self.plan is not None
        assert self.trace is not None
        excess, self._excess_bytes = self._excess_bytes, 0
        settings = msgspec.structs.replace(self._settings, allow_accumulation=self._is_cooperative)
        found = planned_again(self.trace, settings, excess)
        self._can_plan_again = found is not None and self.measured.num_replans + 1 < MAX_REPLANS
        if found is None:
            return
        self._take_back()
        self.measured.num_replans += 1
        self.trace, self.plan = found
        # What was measured so far was another plan's.
        self.measured.peak_bytes, self.measured.step_seconds = 0, []
        if self.on_plan is not None:
            self.on_plan(self)
        self._apply(self.plan)

    def _record_again_under_autocast(self) -> None:
        """Records the next step in lower precision, which the user allowed: observed bytes, not halved ones."""
        assert self._model is not None
        assert self.trace is not None
        dtype = lower_dtype(self.trace.device)
        _log.info("nothing fits in the present precision; recording the next step under %s autocast", dtype)
        self._settings = msgspec.structs.replace(self._settings, autocast=dtype)
        self._undo_autocast = LowerPrecision(self._model, dtype, is_running=self._in_forward).undo
        self.state = "waiting"

    def _apply(self, plan: Plan) -> None:
        assert self._model is not None
        if self._undo_autocast is not None:  # the plan's own action takes its place
            self._undo_autocast()
            self._undo_autocast = None
        order: tuple[str, ...] = ()
        if self.trace is not None:
            order = tuple(block.path for block in find_blocks(self.trace, steady_step(self.trace)))
        applied = AppliedPlan(
            self._model,
            plan,
            block_order=order,
            disk=self._settings.disk,
            disk_capacity_bytes=self._settings.disk_capacity_bytes,
            allocator=self._allocator,
            micro=self._micro,
            is_cooperative=self._is_cooperative,
            is_running=self._in_forward,
            set_by_loop=self._set_by_loop,
        )
        if not any(isinstance(action, AllocatorReuse) for action in plan.actions):
            self._allocator.undo()
        applied.apply()
        self._applied = applied
        self.state = "running"
        self._note_peak()
        self._allocator.trim()
        reset_process_peak()
        self.measured.base_bytes = self.trace.base_bytes if self.trace is not None else process_bytes()
        _log.info("plan applied: %d actions, %s", len(plan.actions), format_bytes(plan.forecast.peak.process_bytes))
