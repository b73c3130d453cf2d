"""Reaches what torch.distributed keeps to itself: the store that the processes of a run met at."""

from collections.abc import Callable
from typing import Any

from memwall.torch_internals.names import function

store_of_all: Callable[[], Any] = function(
    "torch.distributed.distributed_c10d._get_default_store", "one plan for several ranks"
)
"""Returns the store of the initialised process group, a `torch.distributed.Store`.

Raises NotAvailableError without it: ranks cannot agree on a plan.
"""
