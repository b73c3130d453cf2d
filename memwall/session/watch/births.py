"""Notes what memory the tensors of a step take, and which line and module made them; asks later what lives."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memwall.torch_internals.compiler import is_region
from memwall.torch_internals.dispatch import StepMode, active_dispatch_modes, leave_mode
from memwall.torch_internals.storages import StorageWeakRef
from memwall.trace.source_lines import SourceLines

__all__ = ["Births", "Living"]


class Living(NamedTuple):
    """Says what a line has made that is still held."""

    line: str
    """The line of the user's code; "" for none."""
    num_bytes: int
    modules: tuple[str, ...]
    """Paths of the modules in which it ran, the one with the most first; none where that was outside of all."""


class _Birth(NamedTuple):
    storage: StorageWeakRef
    num_bytes: int
    line: int
    module: str


class _Within(threading.local):
    """Holds the modules whose forward a thread runs, the innermost last: autograd's threads run some again."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        """Identities of modules, with the path of the innermost one of the model's."""

    @property
    def path(self) -> str:
        """Returns the path of the innermost module that runs; "" in none."""
        return self.calls[-1][1] if self.calls else ""


class Births(StepMode):
    """Notes from construction until `stop`; what it notes keeps nothing alive.

    Args:
        model: whose modules are named.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = SourceLines()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._born: dict[int, _Birth] = {}
        """Storages by address."""
        self._thread, self._is_stopped = threading.get_ident(), False
        self._within = _Within()
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        self.__enter__()  # type: ignore[no-untyped-call]

    @staticmethod
    def watching() -> tuple[int, ...]:
        """Returns the identities of those that watch this thread's operations now, without notes of a step."""
        return tuple(id(mode) for mode in active_dispatch_modes() if not isinstance(mode, Births))

    def stop(self) -> None:
        """Ends it. Safe to call twice; from another thread it stays there, notes nothing more, and ends with that."""
        if not self._is_stopped and threading.get_ident() == self._thread and self._is_innermost():
            leave_mode(self)
        for hook in self._hooks:
            hook.remove()
        self._is_stopped = True

    def living(self) -> list[Living]:
        """Returns what was noted and is still held, by line of the user's code, the most first."""
        living: dict[int, dict[str, int]] = {}
        for storage, num_bytes, line, module in self._born.values():
            if not storage.expired():
                modules = living.setdefault(line, {})
                modules[module] = modules.get(module, 0) + num_bytes
        found = []
        for line, modules in living.items():
            ordered = sorted(filter(None, modules), key=lambda module: -modules[module])
            found.append(Living(self._source.texts[line] if line >= 0 else "", sum(modules.values()), tuple(ordered)))
        return sorted(found, key=lambda each: -each.num_bytes)

    def _is_innermost(self) -> bool:
        modes = active_dispatch_modes()
        return bool(modes) and modes[-1] is self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_stopped or is_region(func):
            return func(*args, **(kwargs or {}))
        # What is written into, or seen in part, was there before the operation: state, say, and parameters. Memory that
        # it puts under a tensor was not: so comes a batch from a data loader's worker.
        given = {tensor.untyped_storage().data_ptr() for tensor in _plain_in((*args, *(kwargs or {}).values()))}
        out = func(*args, **(kwargs or {}))
        for made in _plain_in((out,)):
            self._note(made, given)
        return out

    def _note(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not address or not num_bytes or address in given:
            return
        known = self._born.get(address)
        if known is None or known.storage.expired():
            self._born[address] = _Birth(StorageWeakRef(storage), num_bytes, self._source.find(), self._within.path)

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module), "") or self._within.path
        self._within.calls.append((id(module), path))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Of a call that another's hook has ended, or that began before the notes, only one of both is seen.
        calls = self._within.calls
        for i in reversed(range(len(calls))):
            if calls[i][0] == id(module):
                del calls[i:]
                return


def _plain_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields tensors with a storage; of one that stands for others the parts are seen when they are made."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _plain_in(value)
        elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            yield value
