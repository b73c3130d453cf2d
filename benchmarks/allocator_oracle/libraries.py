"""The allocator of a release of torch, made to run without a GPU: parts of its CUDA wheel and a driver over a stub."""

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

__all__ = ["Oracle", "prepare"]

_SOURCES = Path(__file__).parent
# The wheels of PyPI from torch 2.11 on are made for it.
_CUDA = "13.0"
_CUDART = "libcudart.so.13"
# Torch's wheel carries the first platform, those of CUDA the second.
_WHEEL_TAGS = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64", "--python-version", "3.11")
_TORCH_PARTS = (
    "torch/lib/libc10.so",
    "torch/lib/libc10_cuda.so",
    "torch/include/c10/",
    "torch/include/torch/headeronly/",
)
_CUDA_PARTS = ("nvidia/cu13/include/",)
_BUILD_FLAGS = ("-O1", "-std=c++20")


class Oracle(NamedTuple):
    """A driver that is ready to run."""

    driver: Path
    library_path: str
    """LD_LIBRARY_PATH for it."""


def prepare(version: str, cache: Path, build: Path) -> Oracle:
    """Downloads what is missing in the cache, and builds the driver.

    Args:
        version: of torch, as "2.13.0".
        cache: parts of wheels are kept here, some 10 MB per release.
        build: a folder for what is built.

    Raises:
        SystemExit: the machine, the compiler or the network does not serve; the message says which.
    """
    machine = (sys.platform, platform.machine())
    if machine != ("linux", "x86_64"):
        raise SystemExit(f"torch's CUDA wheel is run here for Linux on x86_64; this is {' on '.join(machine)}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("the driver is built with g++ 10 or later, and there is no g++ here; install it (Debian: g++)")
    torch = _parts_of(f"torch==={version}", _TORCH_PARTS, cache / f"torch-{version}") / "torch"
    headers = [
        _parts_of(f"{name}=={_CUDA}.*", _CUDA_PARTS, cache / f"{name}-{_CUDA}") / "nvidia/cu13/include"
        for name in ("nvidia-cuda-runtime", "nvidia-cuda-crt")
    ]
    include = [f"-I{path}" for path in (torch / "include", *headers)]
    runtime, driver = build / _CUDART, build / "driver"
    # libc10_cuda.so asks for symbols of the version that is named like the library.
    shared = ("-shared", "-fPIC", f"-Wl,-soname,{_CUDART}", "-Wl,--default-symver")
    _compile(compiler, *_BUILD_FLAGS, *shared, *include, _SOURCES / "runtime.cpp", "-o", runtime)
    # It is also what the allocator opens as NVML.
    (build / "libnvidia-ml.so.1").symlink_to(runtime)
    libraries = (f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10", runtime, "-Wl,--allow-shlib-undefined")
    _compile(compiler, *_BUILD_FLAGS, *include, _SOURCES / "driver.cpp", "-o", driver, *libraries)
    return Oracle(driver, f"{build}:{torch / 'lib'}")


def _parts_of(requirement: str, parts: tuple[str, ...], folder: Path) -> Path:
    """Some files of a wheel, extracted once; the wheel itself is not kept."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {requirement}, once; torch has several hundred MB", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [*_WHEEL_TAGS, "--dest", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"pip could not download {requirement}: is there such a release, and is the package index in reach?\n"
                f"{done.stderr.strip()}"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        extracted = Path(scratch) / "parts"
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(parts)]
            if not names:
                raise SystemExit(f"{wheel.name} has none of {', '.join(parts)}; is it a build for CUDA {_CUDA}?")
            archive.extractall(extracted, names)
        extracted.rename(folder)
    return folder


def _compile(compiler: str, *arguments: object) -> None:
    command = [compiler, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stderr.strip()}")
