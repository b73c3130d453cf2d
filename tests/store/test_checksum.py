"""The blocks' checksum is zlib's, however it is computed."""

import ctypes
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall.native import load_library
from memwall.store import checksum
from memwall.store.checksum import crc32

SIZES = st.one_of(st.integers(0, 300), st.integers(4000, 9000), st.sampled_from([1 << 16, (1 << 20) + 13]))
CPU = Path("/proc/cpuinfo")
needs_library = pytest.mark.skipif(
    load_library("crc32", {}) is None or "pclmulqdq" not in CPU.read_text(),
    reason="no C compiler at the installation, or no carry-less multiplication in this processor",
)


def content(num_bytes: int, seed: int, skipped: int = 0) -> memoryview:
    """Bytes that begin `skipped` bytes into their memory."""
    state, out = seed * 2 + 1, bytearray()
    while len(out) < num_bytes + skipped:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        out += (state >> 8).to_bytes(7, "little") * 5
    return memoryview(out)[skipped : skipped + num_bytes]


@given(SIZES, st.integers(0, 1 << 30), st.integers(0, 17))
def test_it_is_zlibs_at_every_size_and_address(num_bytes: int, seed: int, skipped: int) -> None:
    data = content(num_bytes, seed, skipped)
    assert crc32(data) == zlib.crc32(data)


@needs_library
@given(SIZES, st.integers(0, 1 << 30), st.integers(0, 17))
def test_the_library_alone_agrees_below_the_size_that_it_is_used_from(num_bytes: int, seed: int, skipped: int) -> None:
    data = content(num_bytes, seed, skipped)
    library = checksum._library()
    assert library is not None
    buffer = (ctypes.c_char * num_bytes).from_buffer(data) if num_bytes else b""
    assert library.crc32_of(buffer, num_bytes) == zlib.crc32(data)
    # As processors without registers so wide have it.
    narrower = library.crc32_narrow
    narrower.restype, narrower.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_uint64)
    assert narrower(buffer, num_bytes) == zlib.crc32(data)


def test_read_only_bytes_have_one_too() -> None:
    data = memoryview(bytes(content(10_000, 3)))
    assert crc32(data) == zlib.crc32(data)


def test_without_the_library_zlib_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_library", lambda: None)
    data = content(10_000, 4)
    assert crc32(data) == zlib.crc32(data)


@needs_library
def test_the_memory_can_be_resized_afterwards() -> None:
    data = bytearray(10_000)
    crc32(memoryview(data))
    data.extend(b"more")  # BufferError while somebody still points into it
    assert len(data) == 10_004
