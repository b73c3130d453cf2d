"""Which operations of a recomputed block keep their results."""

import logging
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from memwall.errors import ApplyError
from memwall.torch_internals.operators import schema_of

__all__ = ["KeptOperations"]

_log = logging.getLogger(__name__)


class KeptOperations:
    """Keeps operations by their number, until another one than expected runs in such a place (another input, say).

    What is not expected may be written to later, which torch answers with an error. Older torch asks in both runs, so
    each run is counted on its own.

    Args:
        kept: operation number -> its name, "" for any.
    """

    def __init__(self, kept: dict[int, str]) -> None:
        self._left = {False: dict(kept), True: dict(kept)}
        self._seen = {False: 0, True: 0}
        self._kept_random = ""

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        number, left = self._seen[context.is_recompute], self._left[context.is_recompute]
        self._seen[context.is_recompute] = number + 1
        expected = left.get(number)
        if expected is None:
            if self._kept_random and not context.is_recompute and _is_random(op):
                raise ApplyError(
                    f"the plan keeps the random operation {self._kept_random} of a block and recomputes a later one, "
                    f"{op}, which would then draw other numbers; make the plan again with `memwall plan`"
                )
            return CheckpointPolicy.PREFER_RECOMPUTE
        if expected not in ("", str(op)):
            _log.debug("operation %d is %s and not %s: nothing more is kept in this call", number, op, expected)
            left.clear()
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op.is_view or schema_of(op).is_mutable:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if _is_random(op):
            self._kept_random = str(op)
        return CheckpointPolicy.MUST_SAVE


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags
