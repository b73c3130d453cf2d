"""What DeepSpeed can do on this machine's CPUs, and what it lacks for the rest; nothing is compiled to find out.

DeepSpeed compiles its operators when they are first used, and says what is missing in the middle of a run. What each of
them takes is in its builders (`deepspeed.ops.op_builder`, 0.19.8), and what stage a kind of offload needs in its
configuration's checks.
"""

import ctypes.util
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import Struct

from memwall.apply.deepspeed_adam import compiled_when_used
from memwall.units import format_bytes

__all__ = ["DeepSpeedPart", "deepspeed_parts"]

# Linux, include/uapi/linux/capability.h: may lock any amount of memory.
_CAP_IPC_LOCK = 14
# What is under way at once with the defaults of its section "aio": blocks of a MiB in a queue of eight.
_LEAST_MEMLOCK_BYTES = 8 << 20


class DeepSpeedPart(Struct, frozen=True, kw_only=True):
    """Something that a plan may ask of DeepSpeed."""

    name: str
    missing: tuple[str, ...]
    """What it lacks here, each with what to install or set; () where it is there."""
    note: str = ""
    """What else to know of it."""


def deepspeed_parts(memlock_bytes: int | None) -> tuple[DeepSpeedPart, ...]:
    """Each part that plans on CPUs use.

    Args:
        memlock_bytes: what a process may lock in memory; None for no limit.
    """
    installed = _lacks(_has_module("deepspeed"), "pip install 'torch-memwall[deepspeed]'")
    gloo = _lacks(
        torch.distributed.is_available() and torch.distributed.is_gloo_available(), "a torch with the gloo backend"
    )
    libaio = (
        *_lacks(_has_header("libaio.h"), "the header libaio.h (apt install libaio-dev)"),
        *_lacks(ctypes.util.find_library("aio") is not None, "the library libaio (apt install libaio-dev)"),
    )
    can_lock = memlock_bytes is None or memlock_bytes >= _LEAST_MEMLOCK_BYTES or _may_lock_all()
    memlock = () if can_lock else (f"locked memory: ulimit -l allows {format_bytes(memlock_bytes or 0)}",)
    return (
        DeepSpeedPart(name="ZeRO 1, 2 and 3", missing=(*installed, *gloo)),
        DeepSpeedPart(
            name="optimizer on the CPU",
            missing=(*installed, *_lacking_to_build("cpu_adam")),
            note="frees nothing where the CPU trains",
        ),
        DeepSpeedPart(
            name="NVMe",
            missing=(*installed, *_lacking_to_build("pin_memory", "async_io", needs=libaio), *memlock),
            note="ZeRO 3 only",
        ),
        DeepSpeedPart(
            name="shared-memory collectives",
            missing=(*installed, *_lacking_to_build("deepspeed_shm_comm")),
            note="optional, between processes of one machine",
        ),
        DeepSpeedPart(
            name="activation offload",
            missing=(*installed, *_lacks(torch.cuda.is_available(), "a CUDA device: it needs streams")),
        ),
    )


def _lacking_to_build(*operators: str, needs: Sequence[str] = ()) -> tuple[str, ...]:
    """What is missing to compile those operators that are not there yet."""
    if all(_is_built(name) for name in operators):
        return ()
    compiler = os.environ.get("CXX", "c++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return (
        *_lacks(shutil.which(compiler) is not None, f"a C++ compiler: {compiler} (apt install g++)"),
        *_lacks(header.is_file(), f"Python's headers: {header} (apt install python3-dev)"),
        *_lacks(shutil.which("ninja") is not None, "ninja (pip install ninja, and its folder in PATH)"),
        *_lacks(_has_module("cpuinfo"), "py-cpuinfo (pip install py-cpuinfo)"),
        *needs,
    )


def _is_built(operator: str) -> bool:
    """Whether it was installed with DeepSpeed, or used before."""
    spec = importlib.util.find_spec("deepspeed") if _has_module("deepspeed") else None
    origin = None if spec is None else spec.origin
    installed = [] if origin is None else list((Path(origin).parent / "ops").glob(f"*/{operator}_op*.so"))
    return bool(installed) or compiled_when_used(operator).is_file()


def _lacks(is_there: bool, what: str) -> tuple[str, ...]:
    return () if is_there else (what,)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # somebody put a module of that name there that was not imported
        return False


def _has_header(name: str) -> bool:
    """Where a compiler looks without being told, and where it is told by the usual variables."""
    named = [os.environ.get(variable, "") for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")]
    folders = ["/usr/include", "/usr/local/include", *(folder for text in named for folder in text.split(os.pathsep))]
    return any((Path(folder) / name).is_file() for folder in folders if folder)


def _may_lock_all() -> bool:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
