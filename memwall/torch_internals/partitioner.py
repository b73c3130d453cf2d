"""The partitioner of compiled graphs: which results of a graph's forward are saved, and which its backward makes again.

It reads a ratio, torch's `activation_memory_budget`: at 1 it saves what it finds fastest, at 0 nothing but what the
graph was called with. Nothing here imports the compiler, which takes seconds; a script that compiles has imported it.
"""

import sys
from collections.abc import Callable
from typing import Any

from memwall.patches import Patches
from memwall.torch_internals.names import REGISTRY, Name, find

SavedBytes = Callable[[float], int]
"""Returns how many bytes a graph saves at a ratio, beside what it was called with."""
Choose = Callable[[SavedBytes, float], float]
"""Returns the ratio for a graph, given what it would save at any, and the script's own ratio."""

_WHY = "has compiled graphs make again what they save"
_MODULE = "torch._functorch.partitioners"
_NAMES = tuple(f"{_MODULE}.{name}" for name in ("choose_saved_values_set", "_size_of"))
REGISTRY.update(
    (path, Name(path, _WHY)) for path in _NAMES
)  # looked up when they are asked for: they import the compiler


def cut_by(choose: Choose) -> Callable[[], None] | None:
    """Has graphs that are compiled from now on cut at a ratio that is chosen for each; returns what ends that.

    Meanwhile no graph comes from the compiler's cache, nor goes there: its keys know the script's own ratio only.

    Returns:
        None where this torch's partitioner has other parts, or the compiler was not imported.
    """
    config = _config()
    original, size_of = (find(path, _WHY) for path in _NAMES)
    if config is None or original is None or size_of is None:
        return None

    def chosen(original: Callable[..., Any], graph: Any, info: Any, memory_budget: float = 1.0) -> Any:
        inputs = set(info.inputs)

        def saved_bytes(ratio: float) -> int:
            return sum(int(size_of(node)) for node in original(graph, info, ratio) if node not in inputs)

        return original(graph, info, choose(saved_bytes, memory_budget))

    patches = Patches(_WHY)
    patches.wrap(sys.modules[_MODULE], "choose_saved_values_set", chosen)
    if hasattr(config, "enable_autograd_cache"):
        patches.enter("setting", "torch._functorch", config.patch(enable_autograd_cache=False))
    return patches.undo


def budget_ratio(ratio: float) -> Callable[[], None] | None:
    """Has graphs that are compiled from now on cut at a ratio; returns what ends that.

    Returns:
        None where this torch has no such setting, or the compiler was not imported.
    """
    config = _config()
    if config is None or not hasattr(config, "activation_memory_budget"):
        return None
    patches = Patches(_WHY)
    patches.enter("setting", "torch._functorch", config.patch(activation_memory_budget=ratio))
    return patches.undo


def start_over() -> None:
    """Has everything compiled anew when it is next called."""
    sys.modules["torch"].compiler.reset()


def _config() -> Any:
    return sys.modules.get("torch._functorch.config")
