"""C sources of the tensor heap and of a fast crc32, and the libraries that the installation built, if it could.

They need Linux and a C compiler where no wheel is used. Without them `library_path` is None, and memwall goes on with
what malloc offers, and with zlib.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

__all__ = ["library_path"]


def library_path(name: Literal["tensor_heap", "crc32"]) -> Path | None:
    """A built library, for ctypes; None if the installation has none."""
    folder = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"{name}{suffix}").exists()), None)
