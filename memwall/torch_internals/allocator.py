"""The CUDA caching allocator's settings, and what is in it.

A torch built for CPUs lacks some of the names; nobody asks for them there.
"""

from collections.abc import Callable
from typing import Any

from memwall.torch_internals.names import find, function

_get_settings = find("torch._C._accelerator_getAllocatorSettings", "reading the CUDA allocator's settings back")


def settings_in_force() -> str | None:
    """Returns the string that torch took last, from the environment or by its setter; None where it does not tell.

    torch 2.11 has no such function: what it was given cannot be read back then.
    """
    return None if _get_settings is None else str(_get_settings())


set_settings: Callable[[str], None] = function(
    "torch._C._accelerator_setAllocatorSettings", "setting the CUDA allocator up after torch was imported"
)
"""Has torch take a complete string of settings.

Raises ValueError or RuntimeError for one that it refuses, NotAvailableError without the function: the variables must be
set before torch is imported then.
"""

snapshot: Callable[[], dict[str, Any]] = function("torch.cuda.memory._snapshot", "the CUDA allocator's own snapshot")
"""Returns the allocator's segments, settings and recorded events, as torch's documentation of snapshots has them.

Raises NotAvailableError without it.
"""

_clear_cublas = find("torch._C._cuda_clearCublasWorkspaces", "giving workspaces back where memory has run out")


def clear_cublas_workspaces() -> None:
    """Frees the workspaces of cuBLAS, which come back with the next product; without the function they stay."""
    if _clear_cublas is not None:
        _clear_cublas()


record_history: Callable[..., None] = function(
    "torch.cuda.memory._record_memory_history", "the CUDA allocator's history of allocations"
)
"""Has the allocator note every block that is handed out and comes back, which `snapshot` returns then.

Raises NotAvailableError without it.
"""
