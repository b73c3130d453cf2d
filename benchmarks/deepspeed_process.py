"""How benchmarks start `deepspeed_arm.py`: by the Python of an environment that has DeepSpeed, in a memory group."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cgroup import CappedRun, MemoryCap

__all__ = ["DEFAULT_PYTHON", "deepspeed_run", "failure", "why_no_deepspeed"]

_BENCHMARKS = Path(__file__).resolve().parent
# What `make test-deepspeed` makes.
DEFAULT_PYTHON = _BENCHMARKS.parent / ".venv" / "deepspeed" / "bin" / "python"
_HAS_DEEPSPEED = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
_ERROR_CHARACTERS = 300


def why_no_deepspeed(python: Path) -> str | None:
    """None if this interpreter finds DeepSpeed, else why not."""
    if not os.access(python, os.X_OK):
        return f"there is no {python}; `make test-deepspeed` makes an environment with DeepSpeed"
    if subprocess.run([python, "-c", _HAS_DEEPSPEED], env=_environment(python), check=False).returncode:
        return f"{python} finds no DeepSpeed; `make test-deepspeed` makes an environment that does"
    return None


def deepspeed_run(
    cap: MemoryCap, python: Path, arguments: Sequence[str], *, disk: str, timeout_s: float
) -> tuple[CappedRun, dict[str, Any] | None]:
    """One process of `deepspeed_arm.py` in the group, and what it printed; None where it did not come to its end.

    Raises:
        subprocess.TimeoutExpired: it took too long and was ended.
    """
    # A process that the kernel kills leaves its files: the folder is removed here.
    with tempfile.TemporaryDirectory(prefix="deepspeed-", dir=disk, ignore_cleanup_errors=True) as folder:
        command = [str(python.absolute()), str(_BENCHMARKS / "deepspeed_arm.py"), *arguments, "--disk", folder]
        done = cap.run(command, timeout_s=timeout_s, environment=_environment(python))
    return done, json.loads(done.output) if done.status == 0 else None


def failure(done: CappedRun) -> str:
    """Why a process did not come to its end, in one line; empty where it did."""
    if done.status == 0:
        return ""
    if done.is_oom_killed:
        return "killed by the kernel for its memory"
    last = [line for line in done.errors.splitlines() if line.strip()][-1:]
    return f"status {done.status}: {''.join(last)[:_ERROR_CHARACTERS]}"


def _environment(python: Path) -> dict[str, str]:
    """The compiled operators lie in the environment's own folder, where the Makefile put them; ninja among its
    programs."""
    programs = python.absolute().parent
    paths = [str(_BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(programs.parent / "extensions"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
    }
