"""The CUDA caching allocator's settings: read by torch once, so they must stand before its first allocation."""

import os

import torch

from memwall.errors import ApplyError

__all__ = ["require_cuda_setting"]

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The present name, and the one before it, which torch still reads."""


def require_cuda_setting(setting: str) -> None:
    """Makes sure that torch reads this complete setting; to be called before the script builds its model.

    Raises:
        ApplyError: CUDA has started with another setting, or the user set one.
    """
    present = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if setting in present.values():
        return
    if present:
        name, value = next(iter(present.items()))
        raise ApplyError(
            f"the plan needs {_VARIABLES[0]}={setting}, and the environment has {name}={value}; unset {name}, or set "
            "it to what the plan needs"
        )
    if torch.cuda.is_initialized():
        raise ApplyError(
            f"the plan needs {_VARIABLES[0]}={setting} before CUDA starts, and it has started; set the variable for "
            "the whole process, or run the script with `memwall run --plan`"
        )
    os.environ[_VARIABLES[0]] = setting
