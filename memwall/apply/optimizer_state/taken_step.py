"""An optimizer's step done in another way, under all that surrounds it: hooks, closures, scalers, saving and loading.

The optimizer object stays what its loop, its schedulers and its scaler hold. Its step finds no parameters left to
update, and its state dict the state as torch would have it.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.partial_step import Arguments, with_closure_called, without_closure
from memwall.errors import ApplyError, MemwallError
from memwall.patches import Patches
from memwall.torch_internals.optimizers import step_post_hooks, step_pre_hooks


class TakenStep:
    """Takes an optimizer's step over until `give_back`.

    Args:
        done_to_state: what was done to its state, as in "put its state on disk"; for messages.
        step: updates all parameters that have a gradient; called without gradient mode.
        copier: what makes a copy of a tensor of the state as torch would have it; asked for once a state dict.
        saver: the same for a state dict that is asked for to be saved; by default `copier`.
        after_load: called after it was.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        done_to_state: str,
        step: Callable[[Arguments], None],
        copier: Callable[[], Callable[[Tensor], Tensor]],
        after_load: Callable[[], None],
        saver: Callable[[], Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self._optimizer, self._done_to_state = optimizer, done_to_state
        self._step, self._load = step, after_load
        self._copier, self._saver = copier, saver or copier
        self._withheld: list[dict[str, Any]] | None = None
        self.failure: MemwallError | None = None
        """Is the first error of a step."""
        self._patches = Patches(f"{done_to_state}, and takes its step over")
        self._patches.hook(optimizer.register_step_pre_hook, self._before_step)
        self._before_id = next(reversed(step_pre_hooks(optimizer)))
        self._patches.hook(optimizer.register_step_post_hook, self._after_step)
        after = step_post_hooks(optimizer)
        after.move_to_end(next(reversed(after)), last=False)
        self._patches.hook(optimizer.register_state_dict_post_hook, self._gathered, prepend=True)
        self._patches.hook(optimizer.register_load_state_dict_post_hook, self._after_load, prepend=True)
        # What copy.deepcopy and torch.save ask for; without it they would take what stands in for the state.
        self._patches.replace(optimizer, "__getstate__", self._whole)

    def give_back(self) -> None:
        """Lets the optimizer step by itself again."""
        try:
            self._patches.undo()
        finally:
            self._give_groups_back()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Does the step; what is left for the optimizer is one without parameters."""
        self._give_groups_back()
        if next(reversed(step_pre_hooks(optimizer))) != self._before_id:
            raise ApplyError(
                f"a step pre-hook was registered on the {type(optimizer).__name__} after memwall {self._done_to_state},"
                " and would run after the update that it belongs before; register it before the session starts"
            )
        args, kwargs = with_closure_called(args, kwargs)
        try:
            with torch.no_grad():
                self._step(without_closure(args, kwargs))
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()
            raise
        self._withheld, optimizer.param_groups = optimizer.param_groups, []
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self._give_groups_back()
        # Pre-hooks registered meanwhile come before the next step.
        step_pre_hooks(self._optimizer).move_to_end(self._before_id)

    def _give_groups_back(self) -> None:
        if self._withheld is not None:
            self._optimizer.param_groups, self._withheld = self._withheld, None

    @torch.no_grad()
    def _gathered(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict with all of the state, in tensors that later steps do not change."""
        return self._with_copies(state_dict, self._saver())

    def _with_copies(self, state_dict: dict[str, Any], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def copied(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: copied(item) for key, item in value.items()}
            return copy(value) if isinstance(value, Tensor) else value

        return {**state_dict, "state": copied(state_dict["state"])}

    def _whole(self) -> dict[str, Any]:
        """Returns what a copy or a pickle of the optimizer gets."""
        with torch.no_grad():
            whole = self._with_copies(type(self._optimizer).__getstate__(self._optimizer), self._copier())
        return {**whole, "state": defaultdict(dict, whole["state"])}

    @torch.no_grad()
    def _after_load(self, _: torch.optim.Optimizer) -> None:
        self._load()
