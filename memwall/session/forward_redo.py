"""Calls a model's forward again where memory ran out in it, in loops that call it themselves.

A forward is all that memwall sees of such a loop's step until its backward: its arguments are there, and what it has
changed is put back. What it has returned is the loop's, so that only the first forward of a step is called again: a
graph that an earlier one has made would stay. An evaluation that fails changes no plan: it is called again, once, after
what was free was given back.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.blocks.added_gradients import AddedGradients
from memwall.apply.memory.exhaustion import Exhaustion, forget_frames, is_exhaustion
from memwall.machine.process_group import num_processes
from memwall.session.call_state import CallState
from memwall.session.live_plan import LivePlan
from memwall.session.measurements import Measurements
from memwall.session.recovery import Recovery
from memwall.session.step_borders import StepBorders
from memwall.torch_internals.autograd import current_node, execution_is_transformed, innermost_saved_tensor_hooks
from memwall.torch_internals.dispatch import out_of_inference_mode
from memwall.trace.attached import forward_of

_NUM_CAREFUL = 8
"""Forwards under a plan after which it has shown what it needs."""
_CHEAP_SHARE = 0.002
"""The most that taking the state may be of a step, in those that follow."""
_WEIGHT_OF_LAST = 0.2
_TOO_SHORT = (
    "steps are so short that what a forward changes is taken down in the first ones under a plan alone, and this is a "
    "later one"
)


class ForwardRedo:
    """Runs the forwards of the models that a session follows.

    Args:
        is_in_part: tells whether a part of a step runs, which is done again as a whole.
    """

    def __init__(
        self,
        live: LivePlan,
        borders: StepBorders,
        recovery: Recovery,
        measured: Measurements,
        is_in_part: Callable[[], bool],
    ) -> None:
        self._live, self._borders, self._recovery, self._measured = live, borders, recovery, measured
        self._is_in_part = is_in_part
        self._states: dict[tuple[int, bool], CallState] = {}
        """Those of training apart from those of evaluations, which leave more as it is."""
        self._thread = 0
        """The one in which a forward runs that can be called again."""
        self._is_disturbed = False
        """Whether another thread has called a model meanwhile."""
        self._num_changes = 0
        """How often plans had changed when forwards were last counted."""
        self._num_taken = {True: 0, False: 0}
        """Those since then of training, and those of evaluations."""
        self._seconds = 0.0
        """Says how long it takes to take the state, on average."""

    def run(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a forward of a model, and runs it again under a plan for less where memory runs out.

        Raises:
            OutOfMemoryError: memory ran out, the forward could have been called again, and no plan needs less.
        """
        if self._thread:
            self._is_disturbed |= self._thread != threading.get_ident()
            return forward(*args, **kwargs)
        if self._is_settled():
            self._recovery.why_not_again = self._recovery.why_not_again or _TOO_SHORT
            return forward(*args, **kwargs)
        trains = self._can_be_repeated(model)
        if not (trains or self._evaluates) or _is_captured() or not self._is_worth_it(trains=trains):
            return forward(*args, **kwargs)
        key = id(model), trains
        state = self._states.get(key)
        if state is None or state.model is not model:
            state = self._states[key] = CallState(model)
        self._thread, self._is_disturbed = threading.get_ident(), False
        try:
            if not self._has_memory_for(lambda: state.take(args, kwargs), key):
                return forward(*args, **kwargs)
            run = self._run_until_done if trains else self._evaluated
            result = run(model, forward, state, args, kwargs)
            self._has_memory_for(state.settle, key)
            return result
        finally:
            state.let_go()
            self._thread = 0

    def _has_memory_for(self, taking: Callable[[], None], key: tuple[int, bool]) -> bool:
        """Tells whether state could be taken down; where memory has run out for that, a forward is left to itself."""
        begin = time.perf_counter()
        try:
            with out_of_inference_mode():
                taking()
        except Exception as error:
            if not is_exhaustion(error):
                raise
            del self._states[key]
            return False
        self._seconds += _WEIGHT_OF_LAST * (time.perf_counter() - begin - self._seconds)
        return True

    def _is_worth_it(self, *, trains: bool) -> bool:
        """Tells whether state is taken: before the first forwards under a plan, and where that is nothing to a step."""
        num_changes, seconds = self._live.in_effect.num_changes, self._measured.step_seconds
        if num_changes != self._num_changes:
            self._num_changes, self._num_taken = num_changes, {True: 0, False: 0}
        self._num_taken[trains] += 1
        is_cheap = bool(seconds) and self._seconds <= _CHEAP_SHARE * seconds[-1]
        is_worth_it = self._num_taken[trains] <= _NUM_CAREFUL or is_cheap
        self._recovery.why_not_again = "" if is_worth_it else _TOO_SHORT
        return is_worth_it

    def _is_settled(self) -> bool:
        """Tells, by what is quickly found, whether no state is taken before forwards like the one that begins."""
        seconds = self._measured.step_seconds
        return (
            self._num_taken[torch.is_grad_enabled()] >= _NUM_CAREFUL
            and self._num_changes == self._live.in_effect.num_changes
            and not (seconds and self._seconds <= _CHEAP_SHARE * seconds[-1])
        )

    def forget(self) -> None:
        """Forgets the models that it has known."""
        self._states.clear()

    def _can_be_repeated(self, model: nn.Module) -> bool:
        """Tells whether a failure in the forward that begins may be followed by another one, for all that is known."""
        live = self._live
        return (
            live.plan is not None
            and live.trace is not None
            and live.in_effect.applied is not None
            and self._borders.is_first_forward
            and torch.is_grad_enabled()
            and current_node() is None
            and not execution_is_transformed()
            and not live.in_effect.is_cooperative
            and not live.in_effect.applied.blocks.treats(model)
            and not self._is_in_part()
            and num_processes() == 1
            and innermost_saved_tensor_hooks() is None  # what the script saves by hooks counts a failed forward, too
        )

    @property
    def _evaluates(self) -> bool:
        """Tells whether a forward begins that is an evaluation between two steps."""
        return (
            self._borders.phase == "evaluation"
            and not torch.is_grad_enabled()
            and not execution_is_transformed()
            and not self._is_in_part()
            and num_processes() == 1
        )

    def _evaluated(
        self, model: nn.Module, forward: Callable[..., Any], state: CallState, args: Any, kwargs: Any
    ) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            found = self._recovery.exhaustion_of(error)
            with out_of_inference_mode():
                if found is None or self._is_disturbed or state.why_not():
                    raise
            failure = error
        forget_frames(failure)
        with out_of_inference_mode():
            state.put_back()
        self._recovery.make_room_for_evaluation(found)
        return forward(*args, **kwargs)

    def _run_until_done(
        self, model: nn.Module, forward: Callable[..., Any], state: CallState, args: Any, kwargs: Any
    ) -> Any:
        while True:
            added = AddedGradients()
            try:
                with added:
                    return forward(*args, **kwargs)
            except Exception as error:
                found = self._recovery.exhaustion_of(error)
                if found is None:
                    raise
                reason = self._recovery.why_final(None) or state.why_not()
                if added.are_there:
                    reason = "its forward runs a backward of its own"
                if self._is_disturbed:
                    reason = "another thread has called the model meanwhile"
                self._recovery.why_not_again = reason or ""
                if reason:
                    raise
                failure = error
            # Only here the frames of the failed forward are gone, and with them its tensors.
            forget_frames(failure)
            self._go_back(model, found, state, failure)
            forward = forward_of(model)  # with what the new plan has put around it

    def _go_back(self, model: nn.Module, found: Exhaustion, state: CallState, failure: Exception) -> None:
        if any(map(_is_on_cuda, model.parameters())):
            torch.cuda.empty_cache()
        state.put_back()
        self._borders.drop_step()
        if not self._recovery.plan_for_less(found, again="forward"):
            raise self._recovery.error(found, "no plan needs less than that", has_next=False) from failure
        self._borders.enter_forward(model)


def _is_captured() -> bool:
    """Returns whether a CUDA graph is captured, which would hold what is taken down."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"
