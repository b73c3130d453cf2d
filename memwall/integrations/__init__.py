"""Gives callbacks to Trainers, a plugin to Accelerate, and functions for DeepSpeed and DLRover.

As in `memwall` itself the names are loaded on first use: importing this loads no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memwall.integrations.accelerate import MemwallPlugin as MemwallPlugin
    from memwall.integrations.deepspeed import apply_rest as apply_rest
    from memwall.integrations.dlrover import TunedBatch as TunedBatch
    from memwall.integrations.dlrover import tuned_batch as tuned_batch
    from memwall.integrations.lightning import LightningCallback as LightningCallback
    from memwall.integrations.trainer import MemwallCallback as MemwallCallback

_HOMES = {
    "LightningCallback": "memwall.integrations.lightning",
    "MemwallCallback": "memwall.integrations.trainer",
    "MemwallPlugin": "memwall.integrations.accelerate",
    "TunedBatch": "memwall.integrations.dlrover",
    "apply_rest": "memwall.integrations.deepspeed",
    "tuned_batch": "memwall.integrations.dlrover",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
