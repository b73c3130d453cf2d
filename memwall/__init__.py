"""memwall: make a PyTorch training run fit a byte budget, as fast as the hardware allows, with the same loss.

The public names are loaded on first use: importing memwall loads no other library, changes nothing and starts no
device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memwall.logs import follow_environment as _follow_environment

if TYPE_CHECKING:
    from memwall.apply.shard import shard as shard
    from memwall.checkpoint.files import import_checkpoint as import_checkpoint
    from memwall.checkpoint.resumption import resumed_steps as resumed_steps
    from memwall.checkpoint.resumption import steps as steps
    from memwall.errors import ApplyError as ApplyError
    from memwall.errors import InfeasibleError as InfeasibleError
    from memwall.errors import IntegrationError as IntegrationError
    from memwall.errors import MemwallError as MemwallError
    from memwall.errors import NoEffectError as NoEffectError
    from memwall.errors import NotAvailableError as NotAvailableError
    from memwall.errors import NotExactError as NotExactError
    from memwall.errors import OffloadIOError as OffloadIOError
    from memwall.errors import OutOfMemoryError as OutOfMemoryError
    from memwall.errors import PlanError as PlanError
    from memwall.errors import RankError as RankError
    from memwall.errors import StoreError as StoreError
    from memwall.errors import TraceError as TraceError
    from memwall.errors import UsageError as UsageError
    from memwall.integrations.estimate import estimate as estimate
    from memwall.planning.planfile import Plan as Plan
    from memwall.planning.search import plan as plan
    from memwall.rows.embedding import RowEmbedding as RowEmbedding
    from memwall.rows.embedding import RowEmbeddingBag as RowEmbeddingBag
    from memwall.session.fit import fit as fit
    from memwall.session.session import Session as Session
    from memwall.trace.records import Trace as Trace
    from memwall.trace.trace_builder import record as record
    from memwall.trace.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "ApplyError": "memwall.errors",
    "InfeasibleError": "memwall.errors",
    "IntegrationError": "memwall.errors",
    "MemwallError": "memwall.errors",
    "NoEffectError": "memwall.errors",
    "NotAvailableError": "memwall.errors",
    "NotExactError": "memwall.errors",
    "OffloadIOError": "memwall.errors",
    "OutOfMemoryError": "memwall.errors",
    "Plan": "memwall.planning.planfile",
    "PlanError": "memwall.errors",
    "RankError": "memwall.errors",
    "RowEmbedding": "memwall.rows.embedding",
    "RowEmbeddingBag": "memwall.rows.embedding",
    "Session": "memwall.session.session",
    "StoreError": "memwall.errors",
    "Trace": "memwall.trace.records",
    "TraceError": "memwall.errors",
    "UsageError": "memwall.errors",
    "Workload": "memwall.trace.workload",
    "estimate": "memwall.integrations.estimate",
    "fit": "memwall.session.fit",
    "import_checkpoint": "memwall.checkpoint.files",
    "plan": "memwall.planning.search",
    "record": "memwall.trace.trace_builder",
    "resumed_steps": "memwall.checkpoint.resumption",
    "shard": "memwall.apply.shard",
    "steps": "memwall.checkpoint.resumption",
}

__all__ = sorted([*_HOMES, "__version__"])

_follow_environment()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memwall' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
