"""Does a training step that ran out of memory again, from what it began with, under a plan that needs less."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from memwall.apply.memory.exhaustion import Exhaustion, forget_frames
from memwall.checkpoint.training_state import random_states, restore_random_states
from memwall.errors import RankError
from memwall.session.ranks.joint_parts import FailedStepError, JointParts, Shapes, Told
from memwall.session.recovery import Recovery
from memwall.session.step_borders import StepBorders
from memwall.session.step_state import StepState
from memwall.torch_internals.autograd import version_of

_T = TypeVar("_T")


class _Part(NamedTuple):
    """Holds a part of the present step, as it began: loops draw random numbers between parts."""

    random: dict[str, Any]
    run: Callable[[], Any]
    shapes: Shapes
    begin: Any
    """Says how, under what runs it on all ranks."""


class Redo:
    """Runs the parts of steps that a loop hands over."""

    def __init__(self, recovery: Recovery, borders: StepBorders) -> None:
        self._recovery, self._borders = recovery, borders
        self._state: StepState | None = None
        self._parts: list[_Part] = []
        self._gradients_after: list[tuple[int, int]] = []
        self.is_running = False
        """Whether a part runs, whose forwards are done again with it."""

    @property
    def is_used(self) -> bool:
        """Tells whether the loop hands over the parts of its steps."""
        return self._state is not None

    def run(self, part: Callable[[], _T], shapes: Shapes = (), joint: JointParts | None = None) -> _T:
        """Runs a part of a step: forward and backward of one micro-batch, or of several.

        Args:
            shapes: of its batch; () where that is not known.
            joint: what runs it where other ranks do the step again with this one; None where they do not.

        Raises:
            OutOfMemoryError: memory ran out, and the step cannot be done again.
            RankError: memory ran out on another rank, and the step cannot be done again.
        """
        state = self._begin(part, shapes, joint)
        self.is_running = True
        try:
            return cast(_T, self._run_until_done(state, joint))
        finally:
            self.is_running = False

    def _run_until_done(self, state: StepState, joint: JointParts | None) -> Any:
        parts = self._parts[-1:]
        is_joint = False
        while True:
            try:
                for each in parts:
                    restore_random_states(each.random)
                    plan_hash = self._recovery.plan_hash
                    is_joint = joint is not None and joint.are_careful(each.shapes, plan_hash, each.begin)
                    result = self._run(each, joint if is_joint else None, state)
                self._gradients_after = self._gradients_now()
                return result
            except FailedStepError as error:
                found, where, has_failed_here = error.found, error.where, error.has_failed_here
                failure: Exception = error
            except Exception as error:
                known = None if is_joint else self._recovery.exhaustion_of(error)
                if known is None:
                    raise
                reason = self._recovery.why_final(state)
                if reason:
                    raise self._recovery.error(known, reason) from error
                found, where, has_failed_here, failure = known, "", True, error
            # Only here the frames of the failed step are gone, and with them its tensors.
            forget_frames(failure)
            if joint is not None:
                joint.reset()
            self._go_back(found, where, state, failure, has_failed_here=has_failed_here)
            parts = list(self._parts)

    def end_step(self) -> None:
        """Says that the optimizer has stepped: what comes next is another step."""
        self._parts = []

    def before_plan(self) -> None:
        """Says that the first step has ended: copies that are not needed do not count in the plan."""
        if self._state is not None:
            self._state.drop_constants()

    def _run(self, part: _Part, joint: JointParts | None, state: StepState) -> Any:
        if joint is None:
            return part.run()

        def tell(error: Exception | None) -> tuple[Told, Exception | None]:
            return self._told(error, state)

        return joint.run(part.run, part.shapes, part.begin, tell)

    def _told(self, error: Exception | None, state: StepState) -> tuple[Told, Exception | None]:
        """Says what a failure here, or on another rank, means for the step, and what ends the run here for it."""
        plan_hash = self._recovery.plan_hash
        found = None if error is None else self._recovery.exhaustion_of(error)
        if error is not None and found is None:
            return Told(plan_hash=plan_hash, has_failed=True, ends=str(error) or type(error).__name__), error
        reason = self._recovery.why_final(state, is_joint=True) or ""
        if found is None:
            return Told(plan_hash=plan_hash, has_failed=False, ends=reason), None
        ends = self._recovery.error(found, reason) if reason else None
        told = Told(
            plan_hash=plan_hash,
            has_failed=True,
            phase=found.phase,
            asked_bytes=found.asked_bytes,
            held_bytes=found.held_bytes,
            ends=str(ends or ""),
        )
        return told, ends

    def _begin(self, part: Callable[[], Any], shapes: Shapes, joint: JointParts | None) -> StepState:
        self._borders.begin_part()
        if self._state is None:
            self._state = StepState(self._borders.attached_model)
        # A loop may drop gradients without a step, as loss scaling does: then the step begins here.
        if not self._parts or self._gradients_now() != self._gradients_after:
            self._parts = []
            self._state.take()
        self._parts.append(_Part(random_states(), part, shapes, None if joint is None else joint.begin()))
        return self._state

    def _gradients_now(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in self._borders.attached_model.parameters())
        return [(0, 0) if g is None else (id(g), version_of(g)) for g in gradients]

    def _go_back(
        self, found: Exhaustion, where: str, state: StepState, failure: Exception, *, has_failed_here: bool
    ) -> None:
        if any(p.device.type == "cuda" for p in self._borders.attached_model.parameters()):
            torch.cuda.empty_cache()
        state.restore()
        self._borders.drop_step()
        if self._recovery.plan_for_less(found, where):
            return
        reason = "no plan needs less than that"
        if not has_failed_here:
            raise RankError(f"memory ran out{where}, and no rank can train on alone: {reason}")
        raise self._recovery.error(found, reason, has_next=False) from failure
