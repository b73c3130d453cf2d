"""Which modules bring which parameters into memory: the blocks of a model, and what lies outside them.

A unit is a module whose forward uses parameters. Tied parameters belong to each unit that uses them. A call is one run
of its forward.
"""

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from memwall.apply.streaming.streamed_parameter import StreamedParameter
from memwall.errors import ApplyError
from memwall.trace.gradients.gradient_hooks import has_foreign_hook


class Unit:
    """Names a module whose parameters are in memory while its forward or backward runs."""

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, tuple(parameters)
        self.members: Sequence[StreamedParameter] = ()
        """Lists those that are on disk."""


class Call:
    """Is one run of a unit's forward that a backward may follow."""

    __slots__ = ("__weakref__", "begin", "end", "previous", "unit")

    def __init__(self, unit: Unit, begin: int, end: int, previous: "Call | None") -> None:
        self.unit = unit
        # Among the begins and ends of all calls: one may lie within another.
        self.begin, self.end = begin, end
        # Only the graph keeps calls alive: many may never have a backward.
        self.previous = weakref.ref(previous) if previous is not None else None


def find_units(model: nn.Module, blocks: Sequence[str]) -> tuple[Unit, ...]:
    """Returns the blocks, and every module outside them that has parameters of its own; in the order of the model.

    Args:
        model: the root.
        blocks: paths of modules, none within another.

    Raises:
        ApplyError: the model has no such module, or one lies within another.
    """
    modules = dict(model.named_modules())
    for path in blocks:
        if path not in modules:
            raise ApplyError(
                f"parameters of '{path}' are to be streamed, but {type(model).__name__} has no such module"
            )
        inside = next((other for other in blocks if other != path and _is_within(path, other)), None)
        if inside is not None:
            raise ApplyError(f"parameters are to be streamed for '{path}' and for '{inside}', which holds it; name one")
    units = []
    for path, module in modules.items():
        if path in blocks:
            units.append(Unit(path, module, list(module.parameters())))
        elif not any(_is_within(path, block) for block in blocks):
            own = list(nn.Module.parameters(module, recurse=False))  # some classes have a `parameters` of their own
            if own:
                units.append(Unit(path or type(model).__name__, module, own))
    return tuple(units)


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that stand side by side in a list or sequence with others of their class."""
    found: list[str] = []

    def search(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
            like = [sibling for sibling in module.children() if type(sibling) is type(child)]
            if is_list and len(like) > 1 and any(True for _ in child.children()):
                found.append(inner)
            else:
                search(child, inner)

    search(model, "")
    return tuple(found)


def hooked_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields by name those with others' hooks that run when a gradient is accumulated, as steps in backward do."""
    for name, parameter in model.named_parameters():
        if has_foreign_hook(parameter):
            yield name, parameter


def tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Returns the tensors in what a module takes or returns: in lists, dictionaries and plain objects."""
    if isinstance(value, Tensor):
        yield value
        return
    items: object = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        items = vars(value).values()
    if depth < 6:
        for item in list(items):  # type: ignore[call-overload]
            yield from tensors_in(item, depth + 1)


def _is_within(path: str, other: str) -> bool:
    return path.startswith(f"{other}.") if other else path != other
