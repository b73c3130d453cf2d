"""Hears of a module once it has been imported, by whoever needs it: memwall does not load what a run may do without."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from memwall.patches import Patches


def once_imported(patches: Patches, name: str, do: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module as soon as it has run, or now where it has been imported already.

    Args:
        name: the module's full name.
    """
    known = sys.modules.get(name)
    if known is not None:
        do(known)
        return
    finder = _Finder(name, do)
    sys.meta_path.insert(0, finder)
    patches.add("importer", name, finder.leave)


class _Finder:
    """Finds one module as Python would without it, and then no further one."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self._name, self._do = name, do

    def leave(self) -> None:
        """Takes the finder away. Safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how Python finds the module, and has the function called when that has run; None of all others."""
        if name != self._name:
            return None
        self.leave()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                self._do(module)

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec
