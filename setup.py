"""The C libraries in the two folders named `native`; everything else about the distribution is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Extension, setup

# One build for all is what a Python without the global lock does not have (setuptools refuses it there).
IS_ONE_FOR_ALL = not sysconfig.get_config_var("Py_GIL_DISABLED")
# Plain C without Python's headers, loaded by ctypes, so that one build serves every Python. Where no compiler is found
# the installation goes on without it: plans count what malloc keeps of freed tensors, zlib computes checksums, and
# there are no tables of rows.
TENSOR_HEAP = Extension(
    "memwall.native.tensor_heap",
    sources=[
        "memwall/native/tensor_heap.c",
        "memwall/native/tensor_heap_hook.c",
        "memwall/native/tensor_heap_nodes.c",
    ],
    depends=["memwall/native/tensor_heap.h", "memwall/native/tensor_heap_nodes.h"],
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
    libraries=["dl", "pthread"],
    optional=True,
    py_limited_api=IS_ONE_FOR_ALL,
)
CRC32 = Extension(
    "memwall.native.crc32",
    sources=["memwall/native/crc32.c"],
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
    optional=True,
    py_limited_api=IS_ONE_FOR_ALL,
)
PAGES = Extension(
    "memwall.rows.native.pages",
    sources=["memwall/rows/native/pages.c", "memwall/native/crc32.c", "memwall/rows/native/uring.c"],
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
    libraries=["pthread"],
    optional=True,
    py_limited_api=IS_ONE_FOR_ALL,
)
ROWS = Extension(
    "memwall.rows.native.rows",
    sources=["memwall/rows/native/rows.c"],
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
    optional=True,
    py_limited_api=IS_ONE_FOR_ALL,
)

setup(
    ext_modules=[TENSOR_HEAP, CRC32, PAGES, ROWS] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if sys.platform == "linux" and IS_ONE_FOR_ALL else {},
)
