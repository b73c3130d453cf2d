"""Watches in a recorded step what becomes of gradients: whether the optimizer could use each as soon as it is whole.

It could where a gradient gets its last term when backward reaches the parameter, nothing reads the parameter's old
value from then on, and nobody but the optimizer looks at gradients, parameters or state before the step has ended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memwall.patches import Patches
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.event_log import EventLog
from memwall.trace.gradients.gradient_hooks import OwnHook, keeps_graph
from memwall.trace.gradients.group_values import GroupValues
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import GradientUse


class GradientWatch:
    """Hears of each gradient of a step that is recorded, until `end`.

    Args:
        roots: the models that are trained.
        log: what the step does.
        find_optimizers: returns what is going to step them; asked when the first gradient is there.
    """

    def __init__(self, roots: Sequence[nn.Module], log: EventLog, find_optimizers: Callable[[], Optimizers]) -> None:
        self._log, self._find_optimizers = log, find_optimizers
        self._names = {id(p): (name, p) for root in roots for name, p in root.named_parameters() if p.requires_grad}
        self._whole: dict[int, list[int]] = {}
        """Operations before which a gradient got another term, by its parameter."""
        self._gradients: dict[int, int] = {}
        self._sparse: set[int] = set()
        self._values: dict[int, GroupValues] | None = None
        self._stepped: set[int] = set()
        self._reason = ""
        self._hooks: list[RemovableHandle] = []
        self._patches = Patches("sees whether a backward of a recorded step keeps its graph")

    def begin(self) -> None:
        """Begins to hear of them."""
        hook = OwnHook(self._accumulated)
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for _, p in self._names.values() if p.is_leaf]
        self._patches.wrap(torch.autograd, "backward", self._run_backward)

    def end(self) -> None:
        """Ends that; safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._patches.undo()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Hears that an optimizer begins to step, with what its groups say by then."""
        self._stepped.update(id(p) for group in optimizer.param_groups for p in group["params"])
        known = (self._values or {}).get(id(optimizer))
        if self._values is None:
            self._refuse("backward runs within optimizer.step(closure), or no gradient arrived in one")
        elif known is None:
            self._refuse("the optimizer was not known yet when backward ran")
        elif assigned := known.assigned(optimizer):
            self._refuse(f"'{assigned}' of the optimizer is set between backward and its step")

    def settled(self) -> GradientUse:
        """Returns what the step showed, once it has ended."""
        if not self._whole:
            self._refuse("no gradient arrived in backward")
        elif not self._reason:
            self._refuse(self._use_by_others())
        waiting = () if self._reason else tuple(self._waiting())
        use = GradientUse(reason=self._reason, waiting=waiting)
        self._names, self._values = {}, None  # whoever holds this holds no parameters
        return use

    def _refuse(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if keeps_graph(args, kwargs):
            self._refuse("backward keeps its graph (retain_graph=True), and another may go through it")
        return result

    def _accumulated(self, parameter: Tensor) -> None:
        with without_subclass_functions():  # to look at a parameter does not bring it in
            self._note(parameter)

    def _note(self, parameter: Tensor) -> None:
        if self._values is None:
            self._values = {id(one): GroupValues(one) for one in optimizers_of(self._find_optimizers())}
        if torch.is_grad_enabled():
            self._refuse("backward makes a graph of itself (create_graph=True)")
        self._whole.setdefault(id(parameter), []).append(len(self._log.ops))
        if parameter.grad is not None:
            self._gradients[id(parameter)] = self._log.index_of(local_part(parameter.grad))
            if parameter.grad.is_sparse:
                self._sparse.add(id(parameter))

    def _use_by_others(self) -> str:
        """Returns who looks at gradients, parameters or state between the first gradient and the step's end."""
        log, gradients = self._log, set(self._gradients.values())
        if any(log.storages[index].birth < 0 for index in gradients if index >= 0):
            return "gradients of the last step are added to (zero_grad(set_to_none=False), or none)"
        begin = min(numbers[0] for numbers in self._whole.values())
        steps = [number for number, op in enumerate(log.ops) if op.phase == "optimizer"]
        if not steps:
            return "no optimizer has stepped"
        whole = {self._gradients[key]: numbers[-1] for key, numbers in self._whole.items() if key in self._gradients}
        for number, op in enumerate(log.ops[begin:], begin):
            touched = {*op.inputs, *op.outputs, *op.writes}
            if op.phase == "optimizer":
                continue
            if number > steps[-1]:
                if touched & gradients:
                    return "gradients are looked at, or zeroed in place, after the optimizer's step"
            elif op.phase == "backward":
                if any(number >= whole.get(index, number + 1) for index in touched & gradients):
                    return "gradients are looked at within backward"
            elif touched & gradients:
                return (
                    "gradients are looked at between backward and the optimizer's step (clipped, scaled, or their norm "
                    "logged)"
                )
            elif any(log.storages[index].category in ("parameter", "optimizer_state") for index in touched):
                return "parameters or optimizer state are looked at between backward and the optimizer's step"
        return ""

    def _waiting(self) -> Iterator[tuple[str, int]]:
        """Yields the parameters whose gradients are to wait, with the bytes of these."""
        read_last, in_forward = self._reads()
        first_unpacked = self._first_unpacked()
        for key, numbers in self._whole.items():
            name, parameter = self._names[key]
            with without_subclass_functions():  # to look at a parameter does not bring it in
                index = self._log.index_of(local_part(parameter))
            # A block that is computed again is so when backward first asks for something that it saved: before the
            # operations that make the gradient.
            begun = (first_unpacked.get(call, -1) for call in in_forward.get(index, ()))
            is_read = read_last.get(index, -1) >= numbers[0] or any(number >= numbers[0] for number in begun)
            if len(numbers) > 1 or is_read or key not in self._stepped or key in self._sparse:
                gradient = self._gradients.get(key, -1)
                yield name, self._log.storages[gradient].nbytes if gradient >= 0 else 0

    def _reads(self) -> tuple[dict[int, int], dict[int, set[int]]]:
        """Returns the last operation of a backward that reads each parameter, and the calls that read it in forward."""
        log = self._log
        last: dict[int, int] = {}
        calls: dict[int, set[int]] = {}
        for number, op in enumerate(log.ops):
            for index in op.inputs:
                if log.storages[index].category == "parameter":
                    if op.phase == "backward":
                        last[index] = number
                    elif op.phase in ("forward", "loss"):
                        calls.setdefault(index, set()).update(self._with_callers(op.call))
        return last, calls

    def _first_unpacked(self) -> dict[int, int]:
        """Returns when backward first asked for something that each call has saved."""
        found: dict[int, int] = {}
        for saving in self._log.savings:
            for call in self._with_callers(saving.call) if saving.unpacked >= 0 else ():
                found[call] = min(found.get(call, saving.unpacked), saving.unpacked)
        return found

    def _with_callers(self, call: int) -> Iterable[int]:
        while call >= 0:
            yield call
            call = self._log.calls[call].parent
