"""The step in which every block runs, made from one that left some out: what a later step may come to.

A step of stochastic depth leaves other blocks out each time: that it runs all of them is the most. One of a mixture of
experts leaves out those without a token. When they have some, others have fewer: only gradients and state are new.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence

from memwall.trace.left_out.copied_run import Lacks, with_copies, with_more
from memwall.trace.left_out.siblings import Siblings
from memwall.trace.records import Module, ModuleCall, Step

_log = logging.getLogger(__name__)

_MOST_COPIED_OPS = 1_000_000
"""Operations in all the steps that copies are put into, one after the other: some five seconds."""
_CHOICES = ("aten._local_scalar_dense.default", "aten.nonzero.default")
"""Operations through which Python sees numbers, and may go another way in the next step."""
_ROUTES = ("aten.nonzero.default", "aten.index.Tensor", "aten.masked_select.default")
"""Operations that choose rows by numbers: where a forward hands out rows to some blocks, all of them get them once."""


class Choices:
    """Tells of a step which of its modules may call others than they did.

    Args:
        draws_in_python: whether a forward took random numbers of Python's, or of numpy's, which no operation shows.
    """

    def __init__(self, step: Step, names: Sequence[str], modules: Sequence[Module], *, draws_in_python: bool) -> None:
        self._modules, self._draws_in_python = modules, draws_in_python
        self._choosing, self._routing = (
            {op.module for op in step.ops if names[op.name] in some and op.phase in ("forward", "loss")}
            for some in (_CHOICES, _ROUTES)
        )

    def may_run(self, module: int) -> bool:
        """Returns whether the module, or one that it is in, saw numbers in its own forward."""
        if self._draws_in_python:
            return True
        return self._chooser(module) >= 0

    def is_routed(self, module: int) -> bool:
        """Returns whether the nearest module around it that saw numbers has chosen rows by them."""
        return self._chooser(self._modules[module].parent) in self._routing

    def _chooser(self, module: int) -> int:
        while module >= 0 and module not in self._choosing:
            module = self._modules[module].parent
        return module


def whole_step(
    step: Step,
    modules: Sequence[Module],
    *,
    may_run: Callable[[int], bool],
    is_routed: Callable[[int], bool],
    lacks: Callable[[int, Sequence[int]], Lacks | None],
) -> Step:
    """Returns the step with the blocks that it left out, each in the place of its like; the same one where none was.

    Args:
        may_run: tells of a block whether another step may run it.
        is_routed: tells of a block whether it is given rows that others then do without.
        lacks: returns what does not exist yet of a block, of those alike; None where it is not trained.
    """
    siblings, windows = Siblings(modules), _windows(step)
    num_copied_ops = 0
    for group in siblings.groups():
        if not any(map(may_run, group)):
            continue
        known: dict[int, Lacks | None] = {}
        for window in range(len(windows)):
            while True:
                found = siblings.left_out(windows[window], group)
                for each in found:
                    if each.module not in known:
                        known[each.module] = lacks(each.module, group) if may_run(each.module) else None
                one = next((each for each in found if known[each.module] is not None), None)
                lacking = None if one is None else known[one.module]
                if one is None or lacking is None:
                    break
                if is_routed(one.module):
                    step, known[one.module] = with_more(step, lacking), None
                    continue
                num_copied_ops += len(step.ops)
                if num_copied_ops > _MOST_COPIED_OPS:
                    _log.warning(
                        "the first step left out more blocks than are planned for, among them %s: a step that runs "
                        "most of them may need more than is foreseen",
                        modules[one.module].path,
                    )
                    return step
                step = with_copies(step, one, size=siblings.sizes[one.module], lacks=lacking)
                windows = _windows(step)
                known[one.module] = Lacks()  # by the next forward of the step it has them
    return step


def _windows(step: Step) -> list[list[ModuleCall]]:
    """Returns the calls of each forward and backward of those that are accumulated."""
    begins = [at for name, at in step.marks if name == "accumulation"]
    windows: list[list[ModuleCall]] = [[] for _ in range(len(begins) + 1)]
    for call in step.calls:
        windows[bisect_right(begins, call.start)].append(call)
    return windows
