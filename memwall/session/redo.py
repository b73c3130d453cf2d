"""Does a training step that ran out of memory again, from what it began with, under a plan that needs less."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from memwall.apply.memory.exhaustion import Exhaustion, forget_frames
from memwall.checkpoint.training_state import random_states, restore_random_states
from memwall.session.recovery import Recovery
from memwall.session.step_borders import StepBorders
from memwall.session.step_state import StepState
from memwall.torch_internals.autograd import version_of

_T = TypeVar("_T")


class Redo:
    """Runs the parts of steps that a loop hands over."""

    def __init__(self, recovery: Recovery, borders: StepBorders) -> None:
        self._recovery, self._borders = recovery, borders
        self._state: StepState | None = None
        self._parts: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        """The parts of the present step, each with the random states that it begins with: loops draw between them."""
        self._gradients_after: list[tuple[int, int]] = []

    @property
    def is_used(self) -> bool:
        """Tells whether the loop hands over the parts of its steps."""
        return self._state is not None

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
                found = self._recovery.exhaustion_of(error)
                if found is None:
                    raise
                reason = self._recovery.why_final(state)
                if reason:
                    raise self._recovery.error(found, reason) from error
                failure = error
            # Only here the frames of the failed step are gone, and with them its tensors.
            forget_frames(failure)
            self._go_back(found, state, failure)
            parts = list(self._parts)

    def end_step(self) -> None:
        """Says that the optimizer has stepped: what comes next is another step."""
        self._parts = []

    def before_plan(self) -> None:
        """Says that the first step has ended: copies that are not needed do not count in the plan."""
        if self._state is not None:
            self._state.drop_constants()

    def _begin(self, part: Callable[[], Any]) -> StepState:
        self._borders.begin_part()
        if self._state is None:
            self._state = StepState(self._borders.attached_model)
        # A loop may drop gradients without a step, as loss scaling does: then the step begins here.
        if not self._parts or self._gradients_now() != self._gradients_after:
            self._parts = []
            self._state.take()
        self._parts.append((random_states(), part))
        return self._state

    def _gradients_now(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in self._borders.attached_model.parameters())
        return [(0, 0) if g is None else (id(g), version_of(g)) for g in gradients]

    def _go_back(self, found: Exhaustion, state: StepState, failure: Exception) -> None:
        if any(p.device.type == "cuda" for p in self._borders.attached_model.parameters()):
            torch.cuda.empty_cache()
        state.restore()
        self._borders.drop_step()
        if not self._recovery.plan_for_less(found):
            raise self._recovery.error(found, "no plan needs less than that", has_next=False) from failure
