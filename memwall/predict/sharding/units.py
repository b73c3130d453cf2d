"""The units that a model is divided in: modules whose parameters are gathered, used and reduced together.

The blocks of lists and sequences are units, and so is a module outside of them with as many parameters as a block, such
as an embedding or a head; what is left, and what several units share, belongs to the root.
"""

from collections.abc import Iterable

from msgspec import Struct

from memwall.trace.records import Module, ModuleCall, Step, Trace
from memwall.trace.steps import steady_step


class ShardUnit(Struct, frozen=True, kw_only=True):
    """Describes a unit of a recorded step."""

    path: str
    """Dotted name of its module; "" for the root."""
    calls: tuple[ModuleCall, ...]
    """Executions in the order of forward."""
    parameters: tuple[int, ...]
    """Storages of its parameters, as they are recorded."""
    gradients: tuple[int, ...]
    """Storages of gradients that its backward makes."""

    @property
    def is_root(self) -> bool:
        """Tells whether it is what no other unit took."""
        return self.path == ""


def unit_modules(modules: tuple[Module, ...], called: frozenset[int]) -> tuple[int, ...]:
    """Returns the modules that are units, the root left out, parents before children.

    Args:
        called: modules that run by themselves; a list of blocks does not.
    """
    children: dict[int, list[int]] = {}
    for index, module in enumerate(modules):
        children.setdefault(module.parent, []).append(index)
    sizes = [module.parameter_bytes for module in modules]
    for index in range(len(modules) - 1, 0, -1):  # parents come before their children
        sizes[modules[index].parent] += sizes[index]

    def is_repeated(index: int) -> bool:
        module = modules[index]
        if module.container == "none" or module.is_leaf or sizes[index] == 0 or index not in called:
            return False
        return sum(modules[other].class_name == module.class_name for other in children[module.parent]) > 1

    blocks: list[int] = []
    others: list[int] = []
    waiting = list(reversed(children.get(0, [])))
    while waiting:
        index = waiting.pop()
        if is_repeated(index):
            blocks.append(index)
        elif modules[index].is_leaf:
            others.append(index)
        else:
            waiting.extend(reversed(children.get(index, [])))
    least_bytes = min((sizes[index] for index in blocks), default=0)
    large = [index for index in others if blocks and index in called and sizes[index] >= least_bytes]
    return tuple(sorted(blocks + large))


def find_units(trace: Trace, step: Step) -> tuple[ShardUnit, ...]:
    """Returns the units of a step in the order of their first forward, the root first."""
    modules = trace.modules
    called = frozenset(call.module for call in step.calls)
    chosen = frozenset(unit_modules(modules, called))

    def unit_of(module: int) -> int:
        while module > 0 and module not in chosen:
            module = modules[module].parent
        return max(module, 0)

    users: dict[int, set[int]] = {}
    for op in step.ops:
        if op.phase in ("forward", "loss"):
            for index in op.inputs:
                if step.storages[index].category == "parameter":
                    users.setdefault(index, set()).add(unit_of(op.module))
    owned: dict[int, list[int]] = {}
    for index, storage in enumerate(step.storages):
        if storage.category == "parameter" and storage.birth < 0:
            found = users.get(index, {0})
            owned.setdefault(found.copy().pop() if len(found) == 1 else 0, []).append(index)
    # One whose parameters all belong to the root, such as a tied head, is no unit: nothing of it is gathered alone.
    held = {0, *(module for module in chosen if module in owned)}
    calls = {module: tuple(c for c in step.calls if c.module == module) for module in held}
    made: dict[int, list[int]] = {}
    for index, storage in enumerate(step.storages):
        if storage.category == "gradient" and storage.birth >= 0:
            made.setdefault(_unit_at(storage.birth, calls), []).append(index)
    return tuple(
        ShardUnit(
            path=modules[module].path,
            calls=calls[module],
            parameters=tuple(owned.get(module, ())),
            gradients=tuple(made.get(module, ())),
        )
        for module in sorted(held, key=lambda m: (m != 0, _first(calls[m])))
    )


class TraceUnits:
    """Finds the units of a trace's steps once, for all kinds of sharding and numbers of ranks.

    Attributes:
        steady: the step that repeats; the trace's last, or made from it.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.steady = trace, steady_step(trace)
        steps = {id(step): step for step in (*trace.steps, self.steady)}
        self._found = {key: find_units(trace, step) for key, step in steps.items()}

    def of(self, step: Step) -> tuple[ShardUnit, ...]:
        """Returns the units of one of the trace's steps, or of the steady one."""
        return self._found[id(step)]


def _unit_at(op: int, calls: dict[int, tuple[ModuleCall, ...]]) -> int:
    """Returns the unit whose backward runs then; the root's is all of it."""
    inside = (m for m, found in calls.items() if m and any(c.backward_start <= op < c.backward_end for c in found))
    return next(inside, 0)


def _first(calls: Iterable[ModuleCall]) -> int:
    return min((call.start for call in calls), default=0)
