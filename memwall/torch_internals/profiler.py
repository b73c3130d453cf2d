"""torch's legacy profiler, to which the allocator reports every allocation on a CPU.

It is cheap to switch on around one operator (about 0.1 ms).
"""

from typing import Any

from memwall.torch_internals.names import REGISTRY, error, find

_FOR = "measuring what operators allocate for themselves"

_enable: Any = find("torch._C._autograd._enable_profiler_legacy", _FOR)
_disable: Any = find("torch._C._autograd._disable_profiler_legacy", _FOR)
_config: Any = find("torch._C._profiler.ProfilerConfig", _FOR)
_state: Any = find("torch._C._profiler.ProfilerState", _FOR)
_experimental: Any = find("torch._C._profiler._ExperimentalConfig", _FOR)

has_allocation_events: bool = None not in (_enable, _disable, _config, _state, _experimental)
"""Whether this torch has what it takes; without it workspaces count as 0 bytes."""


def begin_watching_allocations() -> bool:
    """Has allocations on the CPU noted from now on.

    Returns:
        Whether it does: not where a profiler of somebody else's runs.

    Raises:
        NotAvailableError: this torch has no legacy profiler; `has_allocation_events` says so beforehand.
    """
    if not has_allocation_events:
        raise error(next(name for name in REGISTRY.values() if name.needed_for == _FOR and find(*name[:2]) is None))
    try:
        # Memory events on the CPU and nothing else.
        _enable(_config(_state.CPU, False, True, False, False, False, _experimental()))
    except RuntimeError:
        return False
    return True


def end_watching_allocations() -> list[int]:
    """Returns what was allocated since `begin_watching_allocations`, in order: bytes, negative where they were freed.

    The watching ends with it.
    """
    return [
        event.cpu_memory_usage() for thread in _disable() for event in thread if str(event.kind()) == "memory_alloc"
    ]
