"""Steps parameters within backward, as soon as their gradients are whole, and lets go of the gradients.

The optimizer object stays what its loop, its schedulers and its hooks hold: its step finds no gradient of what has been
stepped, and steps the rest. What a loop does otherwise than it did when its step was recorded is an error before it can
change anything: gradients that are looked at, a forward before the step, groups that say something else by then.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.optimizer_state.partial_step import inner_step_of, step_some, without_closure
from memwall.apply.optimizer_state.release_proof import ReleaseProof
from memwall.apply.optimizer_state.spent_gradient import SpentGradient, not_exact
from memwall.patches import Patches
from memwall.torch_internals.autograd import after_backward, version_of
from memwall.torch_internals.optimizers import step_pre_hooks
from memwall.trace.gradient_hooks import OwnHook
from memwall.trace.group_values import GroupValues


class ReleasedGradients:
    """Takes over the steps of one optimizer's parameters until `undo`.

    Args:
        model: whose forward is not to run between backward and step.
        waiting: names of parameters whose gradients wait for the optimizer's step.
        window_bytes: gradients that are used together.
        is_stepping: whether the optimizer steps right now, from whose closure this is begun.

    Raises:
        ApplyError: the optimizer is not known to step each parameter alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        waiting: Collection[str],
        window_bytes: int,
        is_stepping: bool = False,
    ) -> None:
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self._inner = inner_step_of(optimizer, kept="up to date within backward", device=device)
        self._optimizer, self._window_bytes = optimizer, window_bytes
        self.proof = ReleaseProof()
        self.num_released = 0
        """Counts the gradients that were released so far."""
        self.num_steps = 0
        """Counts the optimizer's steps so far."""
        self._values: GroupValues | None = None
        """Says what the groups said when the first parameter of this step was stepped; None where none was."""
        self._pending: dict[Tensor, None] = {}
        self._pending_bytes = 0
        self._is_awaited = False
        """Whether the end of the backward that runs steps what is pending."""
        self._in_step = is_stepping
        self._num_states = len(optimizer.state)
        self._stepped: dict[Tensor, tuple[SpentGradient, int]] = {}
        stays = {id(parameter) for name, parameter in model.named_parameters() if name in waiting}
        self._groups: dict[Tensor, int] = {}
        self._patches = Patches("steps parameters within backward")
        hook = OwnHook(self._accumulated)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in stays:
                    self._groups[parameter] = number
                    self._patches.hook(parameter.register_post_accumulate_grad_hook, hook)
        self._patches.hook(model.register_forward_pre_hook, self._before_forward)
        self._patches.hook(optimizer.register_step_pre_hook, self._before_step)
        self._before_id = next(reversed(step_pre_hooks(optimizer)))
        self._patches.hook(optimizer.register_step_post_hook, self._after_step)

    def undo(self) -> None:
        """Lets gradients stay from now on."""
        self._patches.undo()
        for parameter in self._groups:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._forget_step()

    def _accumulated(self, parameter: Tensor) -> None:
        # A graph of the backward, or a closure's: then gradients stay, as they do without this.
        gradient = parameter.grad
        if torch.is_grad_enabled() or self._in_step or gradient is None or gradient.is_sparse:
            return
        if not self._is_awaited:
            self._is_awaited = True
            after_backward(self._backward_ends)
        if parameter not in self._pending:
            self._pending[parameter] = None
            self._pending_bytes += gradient.nbytes
        if self._pending_bytes >= self._window_bytes:
            self._step_pending()

    def _backward_ends(self) -> None:
        self._is_awaited = False
        self._step_pending()

    @torch.no_grad()
    def _step_pending(self) -> None:
        pending, self._pending, self._pending_bytes = list(self._pending), {}, 0
        parts: dict[int, list[Tensor]] = {}
        for parameter in pending:
            if parameter.grad is not None:  # a loop's hook may have taken it
                parts.setdefault(self._groups[parameter], []).append(parameter)
        if not parts:
            return
        if self._values is None:
            self._values = GroupValues(self._optimizer)
            self.proof.begin_step()
        for number, some in parts.items():
            self.proof.take(self._optimizer, number, some)
        step_some(self._optimizer, self._inner, sorted(parts.items()), ((), {}))
        for some in parts.values():
            for parameter in some:
                spent = SpentGradient(parameter)
                parameter.grad = spent
                self._stepped[parameter] = spent, version_of(parameter)
        self.num_released += sum(map(len, parts.values()))

    def _before_forward(self, *_: Any) -> None:
        """Lets no forward use parameters that are ahead of others."""
        self._pending, self._pending_bytes, self._is_awaited = {}, 0, False  # of a backward that failed
        if self._stepped:
            raise not_exact(
                "a forward runs after a backward whose step the optimizer has not ended, as where gradients of several "
                "backwards add up, or a step is left out"
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._in_step = True
        self._pending, self._pending_bytes, self._is_awaited = {}, 0, False
        if not self._stepped or self._values is None:
            return
        if next(reversed(step_pre_hooks(optimizer))) != self._before_id:
            raise not_exact(f"a step pre-hook of the {type(optimizer).__name__} would run without gradients")
        if changed := self._values.changed(optimizer):
            raise not_exact(f"'{changed}' of the {type(optimizer).__name__} has changed since backward")
        for parameter, (spent, version) in self._stepped.items():
            if parameter.grad is not spent:
                raise not_exact("a gradient was dropped or put in place of another between backward and step")
            if version_of(parameter) != version:
                raise not_exact(f"a parameter {list(parameter.shape)} was written between backward and step")
        for parameter in self._stepped:
            parameter.grad = None
        with torch.no_grad():
            self.proof.check(optimizer, self._inner, without_closure(args, kwargs))
        self._forget_step()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_step = False
        self.num_steps += 1
        # Pre-hooks registered meanwhile come before the next step.
        step_pre_hooks(optimizer).move_to_end(self._before_id)
        if len(optimizer.state) != self._num_states:
            self._num_states = len(optimizer.state)
            self._order_states()

    def _order_states(self) -> None:
        """Has state that was begun within backward lie in the order of the groups, in which a step begins it."""
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state:
                    state[parameter] = state.pop(parameter)

    def _forget_step(self) -> None:
        self._values = None
        self._stepped = {}
        self._pending, self._pending_bytes, self._is_awaited = {}, 0, False
