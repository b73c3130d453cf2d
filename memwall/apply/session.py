"""A training run under a budget: records the first step, plans, applies the plan before the second, measures on.

    waiting --first forward--> recording --first forward after an optimizer step--> running

The first step runs under the safest plan there is: every large saved tensor leaves the device, freed memory goes back
to the system at once. It is a full training step; nothing is thrown away.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.malloc import MallocHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.parking import SafestPlan
from memwall.errors import ApplyError, InfeasibleError, PlanError, UsageError
from memwall.plan.planfile import Plan
from memwall.plan.search import Settings, make_plan
from memwall.predict.limits import device_total_bytes
from memwall.trace.meter import process_bytes, process_peak_bytes, reset_process_peak, return_free_memory
from memwall.trace.modules import fingerprint
from memwall.trace.record import TraceBuilder
from memwall.trace.records import Trace
from memwall.units import format_bytes, parse_size

__all__ = ["Measurements", "Session", "fit"]

_log = logging.getLogger(__name__)


class Measurements(Struct, kw_only=True):
    """What was measured while a session ran."""

    first_step_peak_bytes: int = 0
    peak_bytes: int = 0
    """Highest process bytes of the steps under the plan."""
    overall_peak_bytes: int = 0
    base_bytes: int = 0
    step_seconds: list[float] = []
    num_steps: int = 0
    num_replans: int = 0
    bytes_to_tier: int = 0
    bytes_from_tier: int = 0
    plan_seconds: float = 0.0


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    budget: str | int | None = None,
    plan: Plan | None = None,
    disk: str | None = None,
    allow: Sequence[str] = (),
) -> "Session":
    """A session that makes training `model` with `optimizer` fit a budget, or follow a plan made before.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with fit(model, optimizer, budget="8GiB") as session:
        ...     for _ in range(3):
        ...         loss = model(torch.zeros(3, 4)).sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> session.plan.actions
        ()

    Args:
        budget: what the process may use: a size, or a percentage of the device. Either this or `plan`.
        disk: directory for bytes that leave memory; the system's temporary directory by default.
        allow: relaxations: "precision".

    Raises:
        UsageError: neither or both of budget and plan; a budget that is no size.
        StoreError: the disk directory cannot be used.
    """
    budget_bytes = None if budget is None else parse_size(budget, whole_bytes=device_total_bytes("cpu"))
    session = Session(budget_bytes=budget_bytes, plan=plan, disk=disk, allow=allow)
    session.attach(model, optimizer)
    return session


class Session:
    """See `fit`. One model and one optimizer; a context manager that takes everything back when it ends."""

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        disk_capacity_bytes: int | None = None,
        allow: Sequence[str] = (),
        allow_accumulation: bool = False,
    ) -> None:
        if (budget_bytes is None) == (plan is None):
            raise UsageError("give either a budget or a plan, not both and not neither")
        self._settings = Settings(
            budget_bytes=budget_bytes if budget_bytes is not None else (plan.forecast.budget_bytes or 0) if plan else 0,
            disk=disk,
            disk_capacity_bytes=disk_capacity_bytes,
            allow=tuple(allow),
            allow_accumulation=allow_accumulation,
        )
        self.state: Literal["waiting", "recording", "running", "closed"] = "waiting"
        self.plan: Plan | None = plan
        self.trace: Trace | None = None
        self.measured = Measurements()
        self.on_plan: Callable[[Session], None] | None = None
        """Called once a plan stands, before it is applied: the place to show it, or to object."""
        self._given_plan = plan is not None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._builder: TraceBuilder | None = None
        self._safest: SafestPlan | None = None
        self._applied: AppliedPlan | None = None
        self._malloc = MallocHandler()
        self._autocast: Any = None
        self._micro = MicroBatches()
        self._step_begin = 0.0
        self._has_stepped = False
        self._in_step = False

    # -- life cycle ------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Says which model and optimizer this session trains. The optimizer may follow at its first step."""
        if self._model is not None:
            raise ApplyError("this session already trains a model; use one session for each")
        if self.plan is not None and self.plan.model_fingerprint != fingerprint([model]):
            raise PlanError(
                f"the plan was made for another model: it names {self.plan.model_fingerprint[:12]}, this "
                f"{type(model).__name__} is {fingerprint([model])[:12]}; make a plan for this model with "
                "`memwall plan`, or run with --budget"
            )
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
        try:
            if completed and self.state == "recording" and self._has_stepped:
                self._finish_recording()
        finally:
            self._stop_recording()
            if self._applied is not None:
                self.measured.bytes_to_tier += self._applied.bytes_to_tier
                self.measured.bytes_from_tier += self._applied.bytes_from_tier
                self._applied.undo()
                self._applied = None
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._malloc.undo()
            self.state = "closed"

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
                labels other than -100 if the batch has any, else samples.
        """
        self._settings = Settings(**{**_fields(self._settings), "allow_accumulation": True})
        yield from self._micro.split(batch, count)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, weighted by the present micro-batch's share of the batch."""
        self._micro.backward(loss)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_autograd_node() is not None:  # type: ignore[attr-defined]
            return
        if self._in_step and not self._has_stepped:
            return  # a further micro-batch of the same step
        if self.state == "waiting":
            self._begin_run()
        elif self.state == "recording" and self._has_stepped:
            self._finish_recording()
        self._begin_step(args, kwargs)

    def _begin_run(self) -> None:
        assert self._model is not None
        if self._given_plan:
            assert self.plan is not None
            if self.on_plan is not None:
                self.on_plan(self)
            self._apply(self.plan)
            return
        self._safest = SafestPlan([self._model], self._settings)
        self._malloc.apply_tight()
        self.measured.overall_peak_bytes = process_peak_bytes()
        self._builder = TraceBuilder([self._model], self._safest.engine)
        self._builder.start_step(self._optimizer, running_root=self._model)
        self.state = "recording"

    def _begin_step(self, args: Any, kwargs: Any) -> None:
        self._in_step, self._has_stepped = True, False
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
            reset_process_peak()

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says which optimizer trains the model, once it shows itself."""
        if self._optimizer is None:
            self._optimizer = optimizer
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))

    # -- from recording to running -----------------------------------------------------------------------------------

    def _stop_recording(self) -> None:
        if self._builder is not None:
            self._builder.cancel_step()
            self._builder = None
        if self._safest is not None:
            self._safest.close()
            self._safest = None

    def _finish_recording(self) -> None:
        assert self._builder is not None and self._safest is not None
        begin = time.perf_counter()
        builder, safest = self._builder, self._safest
        step = builder.finish_step(self._optimizer)
        window_bytes = safest.held_window_bytes
        self._stop_recording()
        self.measured.first_step_peak_bytes = step.process_peak_bytes
        return_free_memory()
        self.trace = builder.trace(
            self._optimizer, machine=safest.machine, resident_bytes=process_bytes(), window_bytes=window_bytes
        )
        try:
            self.plan = make_plan(self.trace, self._settings)
        except InfeasibleError:
            if "precision" not in self._settings.allow or self.trace.autocast != "none":
                raise
            self._record_again_under_autocast()
            return
        self.measured.plan_seconds = time.perf_counter() - begin
        if self.on_plan is not None:
            self.on_plan(self)
        self._apply(self.plan)

    def _record_again_under_autocast(self) -> None:
        raise NotImplementedError

    def _apply(self, plan: Plan) -> None:
        assert self._model is not None
        applied = AppliedPlan(self._model, plan, self.trace, self._settings, self._malloc, self._micro)
        applied.apply()
        self._applied = applied
        self.state = "running"
        return_free_memory()
        reset_process_peak()
        self.measured.base_bytes = process_bytes()
        _log.info("plan applied: %d actions, %s", len(plan.actions), format_bytes(plan.forecast.peak.process_bytes))


def _fields(record: Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@contextmanager
def _nothing() -> Iterator[None]:
    yield
