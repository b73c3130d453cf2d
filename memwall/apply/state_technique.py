"""Holds what techniques share that keep the optimizer's state elsewhere, or otherwise: they wait for the optimizer."""

from typing import Any, ClassVar, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memwall.apply.effect import Effect
from memwall.apply.technique import Handler, Target
from memwall.errors import ApplyError, NoEffectError
from memwall.trace.optimizers import joint_name
from memwall.units import format_bytes

S = TypeVar("S", bound=Any)


class StateHandler(Handler[S]):
    """Keeps the state of the optimizer that steps the model."""

    takes_several: ClassVar[bool] = False
    """Whether it keeps that of several as well."""
    is_away: ClassVar[bool] = False
    """Whether the state is out of memory between steps, and stepped a few parameters at a time."""

    _is_known = False
    """Whether the plan knows what takes this back."""
    _waits: bool | None = None
    """Whether a step that has begun is to end before the state leaves; None where none ever was."""

    @property
    def kept(self) -> str:
        """Returns where or how the state is kept, in words."""
        raise NotImplementedError

    def place(self, target: Target) -> None:
        """Puts the state of `target.optimizers` there, from wherever it is.

        Raises:
            MemwallError: it cannot be there.
        """
        raise NotImplementedError

    @classmethod
    def absent(cls, target: Target) -> None:
        """Brings the state back, if no other technique of the plan keeps it either."""
        if not any(isinstance(handler, StateHandler) for handler in target.handlers):
            target.keeper.bring_back()

    def apply(self, target: Target) -> None:
        """Places the state, if there is an optimizer yet."""
        if len(target.optimizers) > 1 and not self.takes_several:
            raise ApplyError(
                f"the plan keeps the optimizer's state {self.kept}, and this model is stepped by several "
                f"({joint_name(target.optimizers)}), whose state stays in memory; make a plan from a trace of this "
                "training, or give a budget in place of a plan"
            )
        if target.optimizers:
            if not self._is_known:  # else it is one that takes the place of another
                self._is_known = True
                target.on_undo(target.keeper.bring_back, is_state=True)
            if target.is_stepping and not target.keeper.is_away:
                self._place_after_step(target)
            else:
                self.place(target)

    def _place_after_step(self, target: Target) -> None:
        """Leaves the state to a step that has begun, from whose closure the plan is applied, and will use it.

        In a hook of every optimizer, which run last: an optimizer that is going through its own gets no further one.
        """

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if self._waits and optimizer in target.optimizers:
                self._waits = False
                self.place(target)

        if self._waits is None:
            target.on_undo(register_optimizer_step_post_hook(after_step).remove)
        self._waits = True

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        target.keeper.set_proving(is_proving)

    def optimizer_known(self, target: Target, optimizer: torch.optim.Optimizer) -> None:
        self.apply(target)


class PlacementEffect(Effect):
    """Sees that the optimizer's state is on another tier between steps, but for what the plan lets stay.

    Args:
        name, expected: see `Effect`.
        min_bytes: tensors of state from which on are counted.
    """

    def __init__(
        self, target: Target, *, name: str, expected: str, tier: str, min_bytes: int, resident_bytes: int
    ) -> None:
        self.name, self.expected = name, expected
        self._tier, self._min_bytes, self._resident_bytes = tier, min_bytes, resident_bytes
        self._target = target
        self._trained = {id(parameter) for parameter in target.model.parameters() if parameter.requires_grad}
        self._num_foreign = 0
        """Steps of another optimizer since the last one of this."""
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def is_seen(self) -> bool:
        return self._target.keeper.away_bytes > 0

    def contrary(self) -> str:
        optimizers = self._target.optimizers
        if not optimizers or self._target.keeper.away_bytes:
            return ""
        present_bytes = sum(
            value.numel() * value.element_size()
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, dict) else ())
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= self._min_bytes
        )
        if present_bytes <= self._resident_bytes:
            return ""
        return (
            f"{format_bytes(present_bytes)} of the {joint_name(optimizers)}'s state are in memory and nothing is on "
            f"the {self._tier}: its tensors are of a kind that cannot be moved"
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Looks at every optimizer of the process: a session hears of its own alone."""
        own = self._target.optimizers
        if not own or optimizer in own:
            self._num_foreign = 0
        elif any(id(p) in self._trained for group in optimizer.param_groups for p in group["params"]):
            self._num_foreign += 1
            if self._num_foreign == 2:
                raise NoEffectError(
                    action=self.name,
                    expected=self.expected,
                    found=f"another optimizer ({type(optimizer).__name__}) trains the model than the "
                    f"{joint_name(own)} this session was given",
                )

    def close(self) -> None:
        self._handle.remove()
