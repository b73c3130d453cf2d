"""Finds the environment of the phantom device: a CUDA build of torch over stub libraries (`phantom/environment.py`)."""

import os
import sys
from pathlib import Path

import torch

from memwall.errors import UsageError

_VARIABLE = "PHANTOM_ENV"
_LIBRARY = Path("device") / "libphantom.so"
_RUN = "lib/python*/site-packages/phantom/run"


def phantom_environment() -> Path:
    """Returns the folder of the environment: the one that PHANTOM_ENV names, or .venv/phantom of a clone.

    Raises:
        UsageError: there is none, or it was not built to its end.
    """
    asked, clone = os.environ.get(_VARIABLE), Path(__file__).resolve().parents[3]
    has_sources = (clone / "phantom" / "environment.py").is_file()
    folder = Path(asked) if asked else clone / ".venv" / "phantom"
    if phantom_runner(folder) is not None:
        return folder.resolve()
    if asked:
        found = f"{_VARIABLE} names {folder}, " + (
            "where that was not built" if folder.is_dir() else "which is no folder"
        )
    elif has_sources:
        found = f"{folder} was not built, and {_VARIABLE} is not set"
    else:
        found = f"this memwall is installed without phantom/, and {_VARIABLE} is not set"
    build = "no CUDA build" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
    at = f"`{sys.executable} phantom/environment.py FOLDER`"
    way = (
        f"run `make phantom` in {clone}"
        if has_sources
        else f"in a clone of memwall run {at}, and set {_VARIABLE}=FOLDER"
    )
    raise UsageError(
        f"--route phantom: needs an environment with a CUDA build of torch over stub libraries; {found} (torch "
        f"{torch.__version__} here is {build}). No GPU is needed: {way} (Linux on x86_64, g++, once), or leave "
        "the option out for --route translate"
    )


def phantom_runner(folder: Path) -> Path | None:
    """Returns the program that runs a command on the phantom device of an environment; None where it was not built."""
    found = next(folder.glob(_RUN), None)
    return found if (folder / _LIBRARY).is_file() else None
