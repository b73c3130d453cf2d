"""C sources, and the libraries built of them: tensor heap, fast crc32, swaps of pages, loops over rows.

The installation builds them if it can: they need Linux and a C compiler where no wheel is used. Without them memwall
goes on with what malloc offers and with zlib, and has no tables of rows.
"""

import ctypes
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal


def load_library(
    name: Literal["tensor_heap", "crc32", "pages", "rows"],
    signatures: Mapping[str, tuple[object, tuple[object, ...]]],
    *,
    folder: Path = Path(__file__).parent,
) -> ctypes.CDLL | None:
    """Returns a built library with the types of its functions declared; None if the installation has none.

    Args:
        folder: where it was built; memwall.native by default.
        signatures: for each function the type of its result, and those of its arguments.
    """
    # First the one for every Python: what an earlier installation built for one may still lie beside it.
    suffixes = (".abi3.so", *EXTENSION_SUFFIXES)
    path = next((path for suffix in suffixes if (path := folder / f"{name}{suffix}").exists()), None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for function_name, (result, arguments) in signatures.items():
        function = getattr(library, function_name)
        function.restype, function.argtypes = result, arguments
    return library
