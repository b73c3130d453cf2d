"""Runs when an interpreter of the phantom's environment starts: with PHANTOM_NUMBERS=1, CUDA tensors get values.

They get them as soon as torch has been imported, so that a script need not know.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _AfterTorch(MetaPathFinder):
    """Prepares the values, and installs them where they are asked for, once torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from phantom import numerics

            numerics.prepare()
            if os.environ.get("PHANTOM_TIME") == "roofline":
                from phantom import roofline

                roofline.install()
            if os.environ.get("PHANTOM_NUMBERS") == "1":
                numerics.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PHANTOM_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
