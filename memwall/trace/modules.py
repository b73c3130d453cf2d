"""The module table of a trace: which modules there are, how they nest, and whose weights they hold."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from memwall.patches import unwrapped
from memwall.torch_internals.compiler import inside_compiled
from memwall.torch_internals.modules import is_running_norm
from memwall.trace.attached import own_forward_of
from memwall.trace.records import Module


class ModuleTable:
    """Numbers the modules below one or several roots.

    With one root, index 0 is that root. With several (say an encoder and a decoder that the script calls one after
    the other) index 0 is a nameless parent, and each root's path starts with `<ClassName>` or `<ClassName>#2`.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = tuple(roots)
        self._inside_compiled = {id(module) for root in self.roots for module in inside_compiled(root)}
        self._index: dict[int, int] = {}
        self._modules: list[nn.Module] = []
        records: list[Module] = []
        if len(self.roots) != 1:
            records.append(Module("", "roots", -1, "none", False, False, False, 0))
        for root, prefix in zip(self.roots, root_names(self.roots), strict=True):
            first_parent = -1 if len(self.roots) == 1 else 0
            self._add(root, prefix, first_parent, "none", records)
        self.records = tuple(records)

    def _add(
        self,
        module: nn.Module,
        path: str,
        parent: int,
        container: Literal["list", "sequential", "none"],
        records: list[Module],
    ) -> None:
        if id(module) in self._index:
            return
        index = len(records)
        self._index[id(module)] = index
        self._modules.append(module)
        children = list(module.named_children())
        records.append(
            Module(
                path=path,
                class_name=_class_name(module),
                parent=parent,
                container=container,
                is_leaf=not children,
                has_batch_norm=any(is_running_norm(child) for child in module.modules()),
                is_wrappable=not isinstance(module, (torch.jit.ScriptModule, nn.ModuleList, nn.ModuleDict))
                and id(module) not in self._inside_compiled,
                parameter_bytes=sum(p.nbytes for p in nn.Module.parameters(module, recurse=False)),
            )
        )
        kind: Literal["list", "sequential", "none"] = "none"
        if calls_layers_in_turn(module):
            kind = "sequential"
        elif isinstance(module, (nn.Sequential, nn.ModuleList)):
            kind = "list"
        for name, child in children:
            self._add(child, f"{path}.{name}" if path else name, index, kind, records)

    def module_at(self, index: int) -> nn.Module | None:
        """Returns the module that a record is of; None for the nameless parent of several roots."""
        index -= len(self.records) - len(self._modules)
        return self._modules[index] if index >= 0 else None

    def index_of(self, module: nn.Module) -> int:
        """Returns the index of a module, or -1 if it is not below a root."""
        return self._index.get(id(module), -1)


def calls_layers_in_turn(module: nn.Module) -> bool:
    """Returns whether a module is a sequence that calls one layer after the other, by torch's own forward.

    FSDP2 gives a sequence another class, which has that forward; Accelerate and scripts may put another one on it.
    """
    own_forward = getattr(own_forward_of(module), "__func__", None)
    return isinstance(module, nn.Sequential) and unwrapped(own_forward) is unwrapped(nn.Sequential.forward)


def root_names(roots: Sequence[nn.Module]) -> list[str]:
    """Returns path prefixes of the roots: "" for a single one, else their class names, numbered where they repeat."""
    if len(roots) == 1:
        return [""]
    seen: dict[str, int] = {}
    names = []
    for root in roots:
        name = type(root).__name__
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def fingerprint(roots: Sequence[nn.Module]) -> str:
    """Returns the SHA-256 of what a plan relies on: module paths and classes; parameter names, shapes, dtypes."""
    digest = hashlib.sha256()
    for root, prefix in zip(roots, root_names(roots), strict=True):
        for path, module in root.named_modules():
            digest.update(f"{prefix}.{path}:{type(module).__qualname__}\n".encode())
        for name, parameter in root.named_parameters():
            digest.update(f"{prefix}.{name}:{tuple(parameter.shape)}:{parameter.dtype}\n".encode())
    return digest.hexdigest()


def as_moved(root: nn.Module, known: set[int] | None = None) -> Iterator[nn.Module]:
    """Yields modules in the order in which they come to a device: torch/nn/modules/module.py, `Module._apply`.

    Args:
        known: identities of modules that are left out, to which those met are added.
    """
    known = set() if known is None else known
    known.add(id(root))
    for child in root.children():
        if id(child) not in known:
            yield from as_moved(child, known)
    yield root


def _class_name(module: nn.Module) -> str:
    """Returns what a module's class is called: one that has the name of torch's, and is another, with where it is."""
    kind = type(module)
    is_another = getattr(nn, kind.__name__, kind) is not kind
    return f"{kind.__module__}.{kind.__name__}" if is_another else kind.__name__
