"""Reaches what torch.distributed keeps to itself: the store that the processes of a run met at, stages of pipelines."""

import gc
import sys
from collections.abc import Callable
from typing import Any

from memwall.torch_internals.names import function

store_of_all: Callable[[], Any] = function(
    "torch.distributed.distributed_c10d._get_default_store", "one plan for several ranks"
)
"""Returns the store of the initialised process group, a `torch.distributed.Store`.

Raises NotAvailableError without it: ranks cannot agree on a plan.
"""


def has_pipeline_stage() -> bool:
    """Returns whether this process holds a stage of one of torch's pipelines; False where this torch keeps none so."""
    known = sys.modules.get("torch.distributed.pipelining.stage")  # not imported: there is none then
    kind = getattr(known, "_PipelineStageBase", None)
    return kind is not None and any(issubclass(type(value), kind) for value in gc.get_objects())
