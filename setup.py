"""The C library of `memwall/native`; everything else about the distribution is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Plain C without Python's headers, loaded by ctypes. Where no compiler is found the installation goes on without it,
# and memwall has malloc return each large tensor, at the price of page faults.
TENSOR_HEAP = Extension(
    "memwall.native.tensor_heap",
    sources=["memwall/native/tensor_heap.c", "memwall/native/tensor_heap_hook.c"],
    depends=["memwall/native/tensor_heap.h"],
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
    libraries=["dl", "pthread"],
    optional=True,
)

setup(ext_modules=[TENSOR_HEAP] if sys.platform == "linux" else [])
