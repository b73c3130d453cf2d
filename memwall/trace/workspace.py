"""What an operator allocates for itself while it runs: invisible outside, and for convolutions as large as a result.

The allocator reports every allocation to torch's legacy profiler, which is cheap to switch on around one operator
(about 0.1 ms). Each operator is measured once per set of input shapes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState

__all__ = ["Workspace", "Workspaces"]

# Smaller inputs than this have no workspace worth measuring.
_LEAST_BYTES = 4 << 10


class Workspace:
    """The highest bytes one run of an operator held beyond what it began with, results included."""

    __slots__ = ("peak_bytes", "workspace_bytes")

    def __init__(self, workspace_bytes: int | None) -> None:
        self.workspace_bytes = workspace_bytes
        self.peak_bytes = 0

    def beyond(self, result_bytes: int) -> int:
        """Bytes besides the results; settles them at the first call."""
        if self.workspace_bytes is None:
            self.workspace_bytes = max(0, self.peak_bytes - result_bytes)
        return self.workspace_bytes


class Workspaces:
    """Measured workspaces by operator and input shapes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Workspace] = {}
        self._is_available = True

    @contextmanager
    def measuring(self, func: Any, inputs: list[Tensor]) -> Iterator[Workspace]:
        """Runs an operator, with the allocator watched if these shapes are new."""
        if not inputs or inputs[0].device.type != "cpu" or max(t.nbytes for t in inputs) < _LEAST_BYTES:
            yield Workspace(0)
            return
        key = (func, *(t.shape for t in inputs))
        known = self._known.get(key)
        if known is not None or not self._is_available:
            yield known or Workspace(0)
            return
        workspace = Workspace(None)
        try:
            _enable_profiler_legacy(_configuration())
        except RuntimeError:  # the script runs a profiler of its own
            self._is_available = False
            yield Workspace(0)
            return
        try:
            yield workspace
        finally:
            live_bytes = 0
            for thread in _disable_profiler_legacy():
                for event in thread:
                    if str(event.kind()) == "memory_alloc":
                        live_bytes += event.cpu_memory_usage()
                        workspace.peak_bytes = max(workspace.peak_bytes, live_bytes)
            self._known[key] = workspace


def _configuration() -> Any:
    """Memory events on the CPU and nothing else."""
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
