"""The blocks that a recorded step left out, and may run later: with what they do not have yet, they are planned for."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.trace.left_out.copied_run import Lacks
from memwall.trace.left_out.whole_step import Choices, whole_step
from memwall.trace.modules import ModuleTable
from memwall.trace.records import Trace


class LeftOutBlocks:
    """Knows of a model what the recorded step has made of each part."""

    def __init__(self) -> None:
        self._without_gradient: set[int] = set()
        self._has_looked = False

    def optimizer_begins(self, model: nn.Module) -> None:
        """Notes which parameters had no gradient as any optimizer began; what a loop drops was there all the same."""
        with without_subclass_functions():  # to look at parameters on disk does not bring them in
            without = {id(one) for one in model.parameters() if one.grad is None}
        self._without_gradient = self._without_gradient & without if self._has_looked else without
        self._has_looked = True

    def lacks(
        self, table: ModuleTable, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[int, Sequence[int]], Lacks | None]:
        """Returns what tells of a block, of those alike, what it lacks; to be called while state is shown."""
        stepped = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        state = {id(parameter): values for one in optimizers for parameter, values in one.state.items()}

        def lacks(index: int, group: Sequence[int]) -> Lacks | None:
            own = _parameters(table, index)
            others = [_parameters(table, other) for other in group if other != index]
            trained = [one for one in own if one.requires_grad]
            alike = [other for other in others if _takes(other) == _takes(own)]
            if not trained or not alike or any(id(one) not in stepped for one in trained):
                return None  # a frozen one, or one that nothing trains
            sizes: list[int] = []
            for place, parameter in enumerate(own):
                if parameter.requires_grad and not state.get(id(parameter)):
                    held: Mapping[str, object] = next(
                        (values for other in alike if (values := state.get(id(other[place])))), {}
                    )
                    sizes += [value.nbytes for value in held.values() if isinstance(value, Tensor)]
            gradients = [one.nbytes for one in trained if id(one) in self._without_gradient]
            return Lacks(tuple(gradients), tuple(sizes))

        return lacks

    def whole(
        self, trace: Trace, table: ModuleTable, optimizers: Sequence[torch.optim.Optimizer], *, draws_in_python: bool
    ) -> Trace:
        """Returns the trace of the step as it were had it left out no block; the same one where it left out none."""
        if not self._has_looked:
            return trace
        step = trace.steps[0]
        choices = Choices(step, trace.names, trace.modules, draws_in_python=draws_in_python)
        with without_subclass_functions():
            lacks = self.lacks(table, optimizers)
            whole = whole_step(step, trace.modules, may_run=choices.may_run, is_routed=choices.is_routed, lacks=lacks)
        return trace if whole is step else msgspec.structs.replace(trace, steps=(whole, *trace.steps[1:]))


def _parameters(table: ModuleTable, index: int) -> list[nn.Parameter]:
    module = table.module_at(index)
    return [] if module is None else list(module.parameters())


def _takes(parameters: Sequence[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]
