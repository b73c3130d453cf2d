"""A training step that runs out of memory is done again, from what it began with, under a plan that needs less."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn

from memwall.apply.memory.exhaustion import Exhaustion, as_error, exhaustion_of, forget_frames
from memwall.checkpoint.training_state import random_states, restore_random_states
from memwall.errors import OutOfMemoryError
from memwall.session.live_plan import LivePlan
from memwall.session.measurements import Measurements
from memwall.session.replanning import budget_after
from memwall.session.step_borders import StepBorders
from memwall.session.step_state import StepState
from memwall.torch_internals.autograd import version_of
from memwall.units import format_bytes

__all__ = ["MAX_RECOVERIES", "Redo"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

MAX_RECOVERIES = 3
"""Of one run: one that needs more has something in it that no plan knows."""


class Redo:
    """Runs the parts of steps that a loop hands over, and explains what runs out of memory elsewhere."""

    def __init__(self, live: LivePlan, borders: StepBorders, measured: Measurements) -> None:
        self._live, self._borders, self._measured = live, borders, measured
        self._state: StepState | None = None
        self._parts: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        """Of the present step, in order, each with the random states that it begins with: loops draw between them."""
        self._gradients_after: list[tuple[int, int]] = []

    def run(self, part: Callable[[], _T]) -> _T:
        """Runs a part of a step: forward and backward of one micro-batch, or of several.

        Raises:
            OutOfMemoryError: memory ran out, and the step cannot be done again.
        """
        state = self._begin(part)
        parts = self._parts[-1:]
        while True:
            try:
                for random, each in parts:
                    restore_random_states(random)
                    result = each()
                self._gradients_after = self._gradients_now()
                return cast(_T, result)
            except Exception as error:
                found = self._exhaustion_of(error)
                if found is None:
                    raise
                reason = self._why_not(state)
                if reason:
                    raise self._error(found, reason) from error
                failure = error
            # Only here the frames of the failed step are gone, and with them its tensors.
            forget_frames(failure)
            self._recover(found, state, failure)
            parts = list(self._parts)

    def end_step(self) -> None:
        """The optimizer has stepped: what comes next is another step."""
        self._parts = []

    def before_plan(self) -> None:
        """The first step has ended: copies that are not needed do not count in the plan."""
        if self._state is not None:
            self._state.drop_constants()

    def explained(self, error: BaseException) -> OutOfMemoryError | None:
        """The typed error for a failure to get memory that nobody handed over; None of any other failure."""
        if isinstance(error, OutOfMemoryError):
            return None
        found = self._exhaustion_of(error)
        if found is None:
            return None
        if found.phase == "optimizer step":
            return self._error(found, "parameters had begun to change, so that the step cannot be done again")
        reason = self._why_not(None) or "the loop computes the gradients itself, so that memwall cannot do that again"
        return self._error(found, reason)

    # -- how it is done ----------------------------------------------------------------------------------------------

    @property
    def _model(self) -> nn.Module:
        assert self._borders.model is not None
        return self._borders.model

    @property
    def _device(self) -> torch.device:
        model = self._borders.model
        first = None if model is None else next(model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def _begin(self, part: Callable[[], Any]) -> StepState:
        self._borders.begin_part()
        if self._state is None:
            self._state = StepState(self._model)
        # A loop may drop gradients without a step, as loss scaling does: then the step begins here.
        if not self._parts or self._gradients_now() != self._gradients_after:
            self._parts = []
            self._state.take()
        self._parts.append((random_states(), part))
        return self._state

    def _gradients_now(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in self._model.parameters())
        return [(0, 0) if g is None else (id(g), version_of(g)) for g in gradients]

    def _exhaustion_of(self, error: BaseException) -> Exhaustion | None:
        return exhaustion_of(error, self._borders.phase, self._measured.meter)

    def _why_not(self, state: StepState | None) -> str | None:
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return (
                f"this is one of {distributed.get_world_size()} processes, and the others wait for its part of this "
                "step: it ends, so that they do not wait for ever"
            )
        if self._live.plan is None:
            return "the first step runs under the safest plan that there is already"
        if self._live.trace is None:
            return "the run follows a plan that was given, and has recorded no step to make another one from"
        if self._measured.oom_recoveries >= MAX_RECOVERIES:
            return f"this run was recovered {MAX_RECOVERIES} times before"
        return None if state is None else state.why_not()

    def _recover(self, found: Exhaustion, state: StepState, failure: Exception) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        state.restore()
        self._borders.drop_step()
        if not self._live.replace_after(self._model, self._borders.optimizers, found):
            raise self._error(found, "no plan needs less than that", has_next=False) from failure
        self._measured.oom_recoveries += 1
        assert self._live.plan is not None
        _log.warning(
            "out of memory in the %s of step %d: %s asked for, %s held; the step is done again; attempt %d of %d, "
            "under a plan for %s",
            found.phase,
            self._measured.num_steps + 1,
            format_bytes(found.asked_bytes),
            format_bytes(found.held_bytes),
            self._measured.oom_recoveries,
            MAX_RECOVERIES,
            format_bytes(self._live.plan.forecast.peak.process_bytes),
        )

    def _error(self, found: Exhaustion, reason: str, *, has_next: bool = True) -> OutOfMemoryError:
        plan = self._live.plan
        next_bytes = budget_after(plan, found) if plan is not None and has_next else 0
        return as_error(
            found,
            num_steps=self._measured.num_steps,
            budget_bytes=self._live.budget_bytes,
            reason=reason,
            next_budget_bytes=next_bytes,
        )
