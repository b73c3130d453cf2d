"""Which operations of a recomputed block keep their results."""

import logging
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from memwall.errors import ApplyError
from memwall.torch_internals.operators import schema_of
from memwall.torch_internals.storages import identity_of
from memwall.torch_internals.trees import tree_leaves

_log = logging.getLogger(__name__)


class KeptOperations:
    """Keeps operations by their number, until another one than expected runs in such a place (another input, say).

    What is not expected may be written to later, which torch answers with an error. Older torch asks in both runs, so
    each run is counted on its own.

    Args:
        kept: operation number -> its name, "" for any.
        is_proving: whether to go on where a kept result is overwritten, and say so; else that is an error.
    """

    def __init__(self, kept: dict[int, str], *, is_proving: bool = False) -> None:
        self.overwritten = ""
        """Says which operation has written into a kept result: a second run would be given what it wrote."""
        self.held_bytes = 0
        """Counts the bytes of the results that are kept, where torch says what an operation returned: from 2.12 on."""
        self._is_proving = is_proving
        self._storages: dict[int, str] = {}
        """Names the operation of each kept result, by its storage: torch holds the results until backward."""
        self._left = {False: dict(kept), True: dict(kept)}
        self._seen = {False: 0, True: 0}
        self._kept_random = ""

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        number, left = self._seen[context.is_recompute], self._left[context.is_recompute]
        self._seen[context.is_recompute] = number + 1
        if self._storages and schema_of(op).is_mutable and not context.is_recompute:
            self._note_writes(op, args, kwargs)
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
        if not context.is_recompute:
            # Before 2.12 torch asks before the operation has run, and leaves it to itself to find such writes.
            for result in _tensors_in(getattr(context, "op_output", None)):
                storage = result.untyped_storage()
                identity = identity_of(storage)
                self.held_bytes += 0 if identity in self._storages else storage.nbytes()
                self._storages[identity] = str(op)
        return CheckpointPolicy.MUST_SAVE

    def _note_writes(self, op: Any, args: Any, kwargs: Any) -> None:
        """Notes that an operation writes into a kept result: torch would not say so."""
        written = [a for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write]
        names = [argument.name for argument in schema_of(op).arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        for tensor in _tensors_in([given.get(argument.name) for argument in written]):
            kept = self._storages.get(identity_of(tensor.untyped_storage()))
            if kept is None:
                continue
            self.overwritten = f"the plan keeps the result of {kept}, and {op} writes into it"
            if not self._is_proving:
                raise ApplyError(
                    f"{self.overwritten}, so that gradients would be wrong: another operation than recorded runs in "
                    "its place; make the plan again with `memwall plan`"
                )


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags
