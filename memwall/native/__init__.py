"""C sources of the tensor heap, and the library that the installation built from them, if it could.

The heap needs Linux and a C compiler where no wheel is used; without it `library_path` is None and memwall goes on with
what malloc itself offers.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["library_path"]


def library_path() -> Path | None:
    """The built library, for ctypes; None if the installation has none."""
    folder = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"tensor_heap{suffix}").exists()), None)
