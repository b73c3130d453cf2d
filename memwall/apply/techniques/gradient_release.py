"""The optimizer steps parameters within backward, and their gradients are let go of at once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memwall.apply.effect import Effect
from memwall.apply.optimizer_state.kept_space import kept_space
from memwall.apply.optimizer_state.partial_step import inner_step_of
from memwall.apply.optimizer_state.released_gradients import ReleasedGradients
from memwall.apply.streaming.open_streaming import is_streamed
from memwall.apply.technique import Handler, Target, register
from memwall.errors import ApplyError
from memwall.machine.process_group import num_processes
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.torch_internals.optimizers import step_post_hooks, step_pre_hooks
from memwall.trace.gradients.gradient_hooks import has_foreign_hook
from memwall.trace.optimizers import counted, joint_name

_PATIENCE_STEPS = 2
"""An optimizer that shows itself with its first step has gradients released from the next one on."""


@register("gradient-release")
class GradientReleaseHandler(Handler[GradientRelease]):
    """Hooks the parameters of the one optimizer that steps the model."""

    _released: ReleasedGradients | None = None

    @classmethod
    def why_not_here(cls, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        if num_processes() > 1:
            return f"this is one of {num_processes()} processes, which exchange gradients after backward"
        if kept_space() is not None:
            return "each step of this run is committed to disk, from parameters that stay as they are until the next"
        if len(optimizers) > 1:
            return f"several optimizers step the model ({counted(joint_name(optimizers))})"
        return next((reason for optimizer in optimizers if (reason := _why_not(optimizer))), None)

    def apply(self, target: Target) -> None:
        reason = self.why_not_here(target.optimizers)
        if reason is not None:
            raise ApplyError(
                f"the plan has the optimizer step within backward, which cannot be done here: {reason}; make a plan "
                "from a trace of this training, or give a budget in place of a plan"
            )
        for optimizer in target.optimizers:
            self._released = ReleasedGradients(
                target.model,
                optimizer,
                waiting=self.action.waiting,
                window_bytes=self.action.window_bytes,
                is_stepping=target.is_stepping,
            )
            target.on_undo(self._undo)

    def _undo(self) -> None:
        if self._released is not None:
            released, self._released = self._released, None
            released.undo()

    def optimizer_known(self, target: Target, optimizer: torch.optim.Optimizer) -> None:
        self._undo()
        self.apply(target)

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        if self._released is not None:
            self._released.proof.is_on = is_proving

    def effect(self, target: Target) -> "ReleaseEffect":
        return ReleaseEffect(self)

    @property
    def counts(self) -> tuple[int, int]:
        """Returns how many gradients were released so far, and in how many steps."""
        return (0, 0) if self._released is None else (self._released.num_released, self._released.num_steps)


class ReleaseEffect(Effect):
    """Sees that gradients are released."""

    name, expected = "step within backward", "gradients are used and let go of before backward ends"

    def __init__(self, handler: GradientReleaseHandler) -> None:
        self._handler = handler

    def is_seen(self) -> bool:
        return self._handler.counts[0] > 0

    def contrary(self) -> str:
        num_released, num_steps = self._handler.counts
        if num_released or num_steps < _PATIENCE_STEPS:
            return ""
        return "the optimizer has stepped, and none of its gradients came by way of a plain backward"


def _why_not(optimizer: torch.optim.Optimizer) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        inner_step_of(optimizer, kept="up to date within backward", device=parameters[0].device)
    except ApplyError as error:
        return str(error)
    if any(not is_streamed(p) and has_foreign_hook(p) for p in parameters):
        return "a parameter has a hook that runs when its gradient is accumulated"
    if any(_is_foreign(hook) for hook in _step_hooks(optimizer)):
        return f"the {type(optimizer).__name__} has step hooks of the script's, which may look at gradients"
    return None


def _step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    yield from step_pre_hooks(optimizer).values()
    yield from step_post_hooks(optimizer).values()


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return not str(getattr(function, "__module__", "")).startswith("memwall.")
