"""What DeepSpeed can do on this machine's CPUs, and what it lacks for the rest; nothing is compiled to find out.

DeepSpeed compiles its operators when they are first used, and says what is missing in the middle of a run. What each of
them takes is in its builders (`deepspeed.ops.op_builder`, 0.19.8), and what stage a kind of offload needs in its
configuration's checks.
"""

import ctypes.util
import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import Struct

from memwall.apply.optimizer_state.deepspeed_adam import compiled_when_used
from memwall.units import format_bytes

__all__ = ["DeepSpeedPart", "deepspeed_parts"]

# Linux, include/uapi/linux/capability.h: may lock any amount of memory.
_CAP_IPC_LOCK = 14


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
    cc = _program("CC", sysconfig.get_config_var("CC") or "cc")
    # DeepSpeed's check of libaio takes CFLAGS and LDFLAGS; torch, which then compiles the operator, does not.
    flags = compiled_when_used("async_io").is_file()
    libaio = (
        *_lacks(shutil.which(cc) is not None, f"a C compiler: {cc} (apt install gcc)"),
        *_lacks(
            _has_header("libaio.h", flags=flags),
            "the header libaio.h (apt install libaio-dev, or its folder in CPATH)",
        ),
        *_lacks(
            _has_library("aio", flags=flags),
            "the library libaio (apt install libaio-dev, or its folder in LIBRARY_PATH and LD_LIBRARY_PATH)",
        ),
    )
    can_lock = memlock_bytes is None or _may_lock_all()
    locked = (
        "locked memory for its buffers (buffer_count x buffer_size): "
        f"ulimit -l allows {format_bytes(memlock_bytes or 0)} "
        "(ulimit -l unlimited, or memlock in /etc/security/limits.conf)"
    )
    return (
        # Whichever stage, its communication loads the operator for processes of one machine (deepspeed/comm/torch.py).
        DeepSpeedPart(name="ZeRO 1, 2 and 3", missing=(*installed, *gloo, *_lacking_to_build("deepspeed_shm_comm"))),
        DeepSpeedPart(
            name="optimizer on the CPU",
            missing=(*installed, *_lacking_to_build("cpu_adam")),
            note="frees nothing where the CPU trains",
        ),
        DeepSpeedPart(
            name="NVMe",
            missing=tuple(
                dict.fromkeys(
                    (
                        *installed,
                        *_lacking_to_build("deepspeed_shm_comm", "pin_memory"),
                        *_lacking_to_build("async_io", needs=libaio),
                        *_lacks(can_lock, locked),
                    )
                )
            ),
            note="ZeRO 3 only",
        ),
        DeepSpeedPart(
            name="activation offload",
            missing=(*installed, *_lacks(torch.cuda.is_available(), "a CUDA device: it needs streams")),
        ),
    )


def _lacking_to_build(*operators: str, needs: Sequence[str] = ()) -> tuple[str, ...]:
    """What is missing to compile those operators that were not installed with DeepSpeed.

    What was compiled at its first use needs all of it again but the compiler and headers: before each load DeepSpeed
    asks for ninja, and for async_io compiles and links a program in C (`jit_load` and `is_compatible` of its builders).
    """
    named = [name for name in operators if not _is_installed(name)]
    if not named:
        return ()
    header = Path(sysconfig.get_path("include")) / "Python.h"
    cxx = _program("CXX", "c++")
    is_compiled = all(compiled_when_used(name).is_file() for name in named)
    to_compile = (
        *_lacks(shutil.which(cxx) is not None, f"a C++ compiler: {cxx} (apt install g++)"),
        *_lacks(header.is_file(), f"Python's headers: {header} (apt install python3-dev)"),
    )
    return (
        *(() if is_compiled else to_compile),
        *_lacks(shutil.which("ninja") is not None, "ninja (pip install ninja, and its folder in PATH)"),
        *needs,
    )


def _program(variable: str, default: str) -> str:
    """The program that a variable of the environment names, which may have options after it."""
    return next(iter(shlex.split(os.environ.get(variable, default))), default)


def _is_installed(operator: str) -> bool:
    """Whether it was compiled when DeepSpeed was installed."""
    spec = importlib.util.find_spec("deepspeed") if _has_module("deepspeed") else None
    origin = None if spec is None else spec.origin
    return origin is not None and any((Path(origin).parent / "ops").glob(f"*/{operator}_op*.so"))


def _lacks(is_there: bool, what: str) -> tuple[str, ...]:
    return () if is_there else (what,)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # somebody put a module of that name there that was not imported
        return False


def _has_header(name: str, *, flags: bool) -> bool:
    """Where a compiler looks without being told, where the usual variables tell it, and where CFLAGS do."""
    named = [os.environ.get(variable, "") for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")]
    folders = ["/usr/include", "/usr/local/include", *(folder for text in named for folder in text.split(os.pathsep))]
    told = _named_in("CFLAGS", "-I") if flags else []
    return any((Path(folder) / name).is_file() for folder in (*folders, *told) if folder)


def _has_library(name: str, *, flags: bool) -> bool:
    """Where a linker looks without being told, where LIBRARY_PATH tells it, and where LDFLAGS do."""
    told = _named_in("LDFLAGS", "-L") if flags else []
    folders = [*os.environ.get("LIBRARY_PATH", "").split(os.pathsep), *told]
    return ctypes.util.find_library(name) is not None or any(
        (Path(folder) / f"lib{name}.so").exists() for folder in folders if folder
    )


def _named_in(variable: str, option: str) -> list[str]:
    """Folders that compiler flags name, in the option's word or in the next one."""
    words = iter(shlex.split(os.environ.get(variable, "")))
    return [word.removeprefix(option) or next(words, "") for word in words if word.startswith(option)]


def _may_lock_all() -> bool:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
