"""Steps parameters within backward, as soon as their gradients are whole, and lets go of the gradients.

The optimizer object stays what its loop, its schedulers and its hooks hold: its step finds no gradient of what has been
stepped, and steps the rest. What a loop does otherwise than it did when its step was recorded is an error where that
can be seen: gradients that are looked at, a forward before the step, groups that say something else by then.
"""

import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from memwall.apply.optimizer_state.partial_step import inner_step_of, step_some, without_closure
from memwall.apply.optimizer_state.release_proof import ReleaseProof
from memwall.apply.optimizer_state.spent_gradient import SpentGradient, not_exact
from memwall.patches import Patches
from memwall.torch_internals.autograd import after_backward, current_backward, version_of
from memwall.torch_internals.optimizers import step_pre_hooks
from memwall.trace.attached import attach_hook
from memwall.trace.gradients.gradient_hooks import OwnHook, has_foreign_hook, keeps_graph
from memwall.trace.gradients.group_values import GroupValues

_log = logging.getLogger(__name__)


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
        self._keeps_graph = False
        """Whether the graph of the backward that runs is there after it."""
        self._num_states, self._state = len(optimizer.state), optimizer.state
        self._stepped: dict[Tensor, tuple[SpentGradient, int]] = {}
        """Says what stands for the gradient of each parameter that is ahead of the others, and its version."""
        self._spent: dict[Tensor, SpentGradient] = {}
        """Says what stands for gradients while the optimizer's own step is to find none."""
        self._groups: dict[Tensor, int] = {}
        """Says which group each parameter is in, as of the first gradient of this step."""
        self._patches = Patches("steps parameters within backward")
        self._guards = Patches("lets no part of the model run with parameters that are ahead of others")
        self._owners: dict[Tensor, list[nn.Module]] = {}
        hook = OwnHook(self._accumulated)
        grouped = self._groups_now()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter in grouped and name not in waiting:
                self._patches.hook(parameter.register_post_accumulate_grad_hook, hook)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, []).append(module)
        self._patches.wrap(torch.autograd, "backward", self._run_backward)
        self._patches.push(attach_hook(model.register_forward_pre_hook, self._before_forward))
        self._patches.push(attach_hook(model.register_state_dict_pre_hook, self._before_saving))
        self._patches.hook(optimizer.register_state_dict_pre_hook, self._before_saving)
        self._patches.hook(optimizer.register_load_state_dict_pre_hook, self._before_saving)
        self._patches.hook(optimizer.register_step_pre_hook, self._before_step)
        self._before_id = next(reversed(step_pre_hooks(optimizer)))
        self._patches.hook(optimizer.register_step_post_hook, self._after_step)

    def undo(self) -> None:
        """Lets gradients stay from now on.

        Raises:
            NotExactError: the optimizer has not ended the step of a backward, and no other error is under way.
        """
        self._patches.undo()
        for parameter in {**self._groups, **self._stepped}:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        num_stepped = len(self._stepped)
        self._forget_step()
        if num_stepped and sys.exc_info()[1] is None:
            raise not_exact("the training ends after a backward whose step the optimizer has not ended")
        if num_stepped:
            _log.warning(
                "%d parameters were stepped within a backward that the optimizer's step did not follow; the rest were "
                "not: the weights are those of no step",
                num_stepped,
            )

    def _groups_now(self) -> dict[Tensor, int]:
        groups = enumerate(self._optimizer.param_groups)
        return {parameter: number for number, group in groups for parameter in group["params"]}

    def _run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stepped and current_backward() < 0:
            raise not_exact("a second backward runs before the optimizer has ended the step of the first")
        was_kept, self._keeps_graph = self._keeps_graph, self._keeps_graph or keeps_graph(args, kwargs)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if self._stepped and "modified by an inplace operation" in str(error):
                raise not_exact("backward reads a parameter that has been stepped already") from error
            raise
        finally:
            self._keeps_graph = was_kept

    def _accumulated(self, parameter: Tensor) -> None:
        # A graph of the backward, one that may be gone through again, or a closure's: then gradients stay, as they do
        # without this.
        gradient = parameter.grad
        is_kept = self._keeps_graph or self._in_step
        if torch.is_grad_enabled() or is_kept or gradient is None or gradient.is_sparse:
            return
        if self._values is None and not self._pending:
            self._groups = self._groups_now()
        if parameter not in self._groups or has_foreign_hook(parameter):
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
            self._values, self._state = GroupValues(self._optimizer), self._optimizer.state
            self.proof.begin_step()
        for number, some in parts.items():
            self.proof.take(self._optimizer, number, some)
        every = [parameter for some in parts.values() for parameter in some]
        # Noted before: where memory runs out in between, nobody knows which of them are stepped.
        self._stepped |= {parameter: (SpentGradient(parameter), -1) for parameter in every}
        try:
            step_some(self._optimizer, self._inner, sorted(parts.items()), ((), {}))
        finally:
            increment_version(every)  # fused kernels write unseen
        for parameter in every:
            spent, _ = self._stepped[parameter]
            parameter.grad, self._stepped[parameter] = spent, (spent, version_of(parameter))
            # Only for so long, as what compiles a forward would compile a hook with it.
            for module in self._owners[parameter]:
                self._guards.push(attach_hook(module.register_forward_pre_hook, self._before_part))
        self.num_released += len(every)

    def _before_part(self, module: nn.Module, _: Any) -> None:
        raise not_exact(f"a {type(module).__name__} runs with parameters that have been stepped already")

    def _before_saving(self, *_: Any) -> None:
        if self._stepped:
            raise not_exact("weights or state are saved or loaded between backward and the optimizer's step")

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
        if any(isinstance(p.grad, SpentGradient) for p in self._groups if p not in self._stepped):
            raise not_exact("the optimizer steps again with a gradient that it has used")
        if not self._stepped or self._values is None:
            return
        if next(reversed(step_pre_hooks(optimizer))) != self._before_id:
            raise not_exact(f"a step pre-hook of the {type(optimizer).__name__} would run without gradients")
        if changed := self._values.changed(optimizer):
            raise not_exact(f"'{changed}' of the {type(optimizer).__name__} has changed since backward")
        if self._groups_now() != self._groups:
            raise not_exact(f"the {type(optimizer).__name__} has other parameters since backward")
        if optimizer.state is not self._state:
            raise not_exact(f"the state of the {type(optimizer).__name__} was replaced since backward")
        for parameter, (spent, version) in self._stepped.items():
            if version < 0:
                raise not_exact("stepping a parameter within backward failed midway")
            if parameter.grad is not spent:
                raise not_exact("a gradient was dropped or put in place of another between backward and step")
            if version_of(parameter) != version:
                raise not_exact(f"a parameter {list(parameter.shape)} was written between backward and step")
        for parameter in self._stepped:
            parameter.grad = None
        with torch.no_grad():
            self.proof.check(optimizer, self._inner, without_closure(args, kwargs))
        self._spent = {parameter: spent for parameter, (spent, _) in self._stepped.items()}
        self._forget_step()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_step = False
        self.num_steps += 1
        # Until the loop drops it: a gradient that is read or added to after the step is not there.
        for parameter, spent in self._spent.items():
            parameter.grad = spent
        self._spent = {}
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
        self._guards.undo()
        self._values = None
        self._stepped = {}
        self._pending, self._pending_bytes, self._is_awaited = {}, 0, False
