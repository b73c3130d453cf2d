"""Recompute handler: a block's forward runs again in backward, fully or but for chosen results, to the same bits.

The executor is torch's non-reentrant checkpoint, which restores RNG and autocast state. Added here: selective keeping by
operation number, running statistics that are updated once, and key-value caches that are not extended twice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memwall.errors import ApplyError
from memwall.trace.modules import is_batch_norm

__all__ = ["recomputed"]

Forward = Callable[..., Any]


def recomputed(module: nn.Module, forward: Forward, kept_ops: tuple[int, ...]) -> Forward:
    """A forward that keeps only its inputs and the results of `kept_ops`, and runs again in backward.

    Args:
        module: whose forward it is; its BatchNorm layers update their running statistics in the first run only.
        kept_ops: operation numbers within the call, as selective checkpointing counts them.
    """
    norms = [child for child in module.modules() if is_batch_norm(child)]
    contexts = partial(_contexts, norms, frozenset(kept_ops))

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _without_cache(name, value) for name, value in kwargs.items()}
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _contexts(
    norms: list[nn.Module], kept_ops: frozenset[int]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run and of the recomputation, made anew for each call."""
    if not kept_ops:
        return nullcontext(), _spared_statistics(norms) if norms else nullcontext()
    first, again = create_selective_checkpoint_contexts(_Policy(kept_ops))
    return first, _both(_spared_statistics(norms), again) if norms else again


class _Policy:
    """Keeps operations by their number. Older torch asks in both runs, so each run is counted on its own."""

    def __init__(self, kept_ops: frozenset[int]) -> None:
        self._kept_ops = kept_ops
        self._seen = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        number = self._seen[context.is_recompute]
        self._seen[context.is_recompute] = number + 1
        if number in self._kept_ops and not op.is_view and not op._schema.is_mutable:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


@contextmanager
def _spared_statistics(norms: list[nn.Module]) -> Iterator[None]:
    """Lets BatchNorm layers write to copies of their running statistics; a batch must be counted once."""
    originals = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            if buffer is not None:
                norm._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)


def _without_cache(name: str, value: Any) -> Any:
    """Drops an empty key-value cache: running twice would extend it twice, and training does not read it."""
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return value
    if int(value.get_seq_length()) > 0:
        raise ApplyError(
            f"a block to be recomputed was called with a key-value cache in '{name}' that already holds "
            f"{int(value.get_seq_length())} positions; train with use_cache=False"
        )
    return None
