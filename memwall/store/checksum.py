"""The checksum of blocks: zlib's crc32, computed by an instruction for it where the processor has one.

Blocks are checked in threads beside the training, which want the cores too; `benchmarks/checksum.py` has both speeds.
"""

import ctypes
import functools
import zlib

from memwall.native import load_library

# Below, the call costs what it saves.
_MIN_BYTES = 4096


def crc32(data: memoryview) -> int:
    """Returns what `zlib.crc32` gives. Other threads run meanwhile."""
    library = _library()
    if library is None or data.readonly or data.nbytes < _MIN_BYTES:
        return zlib.crc32(data)
    value: int = library.crc32_of(ctypes.byref(ctypes.c_char.from_buffer(data)), data.nbytes)
    return value


@functools.cache
def _library() -> ctypes.CDLL | None:
    signatures = {
        "crc32_is_fast": (ctypes.c_int, ()),
        "crc32_of": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_uint64)),
    }
    library = load_library("crc32", signatures)
    return library if library is not None and library.crc32_is_fast() else None
