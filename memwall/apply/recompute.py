"""Recompute handler: a block's forward runs again in backward, fully or but for chosen results, to the same bits.

The executor is torch's non-reentrant checkpoint, which restores RNG and autocast state. Added here: selective keeping
by operation number, running statistics that are updated once, and key-value caches that are not extended twice.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memwall.errors import ApplyError
from memwall.planning.actions import Recompute
from memwall.torch_internals.modules import own_buffers
from memwall.torch_internals.operators import schema_of
from memwall.trace.modules import is_batch_norm

__all__ = ["recomputed"]

Forward = Callable[..., Any]

_log = logging.getLogger(__name__)


def recomputed(module: nn.Module, forward: Forward, action: Recompute) -> Forward:
    """A forward that keeps only its inputs and the results of the action's kept operations, and runs again in backward.

    Args:
        module: whose forward it is; its BatchNorm layers update their running statistics in the first run only.
        action: which operations to keep. Without names they are kept by number alone.
    """
    norms = [child for child in module.modules() if is_batch_norm(child)]
    names = action.kept_names or ("",) * len(action.kept_ops)
    contexts = partial(_contexts, norms, dict(zip(action.kept_ops, names, strict=True)))
    indices: set[Any] = {getattr(child, "layer_idx", None) for child in module.modules()}
    layers = sorted(int(index) for index in indices if isinstance(index, int))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_cache, (*args, *kwargs.values()))):
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        args = tuple(_unfilled(value, layers) for value in args)
        kwargs = {name: _unfilled(value, layers) for name, value in kwargs.items()}
        return checkpoint(with_own_caches, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def with_own_caches(*args: Any, **kwargs: Any) -> Any:
        return forward(
            *(_unfilled(value, layers) for value in args),
            **{name: _unfilled(value, layers) for name, value in kwargs.items()},
        )

    return run


def _contexts(
    norms: list[nn.Module], kept: dict[int, str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run and of the recomputation, made anew for each call."""
    if not kept:
        return nullcontext(), _SparedStatistics(norms) if norms else nullcontext()
    first, again = create_selective_checkpoint_contexts(_Policy(kept))
    return first, _SparedStatistics(norms, again) if norms else again


class _Policy:
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


class _SparedStatistics:
    """Lets BatchNorm layers write to copies of their running statistics; a batch must be counted once.

    Can be entered again and again, as a backward with retain_graph does.

    Args:
        norms: the layers.
        inner: entered inside, if given.
    """

    def __init__(self, norms: list[nn.Module], inner: AbstractContextManager[Any] | None = None) -> None:
        self._norms = norms
        self._inner = inner or nullcontext()
        self._originals: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._originals = [dict(own_buffers(norm)) for norm in self._norms]
        for norm in self._norms:
            for name, buffer in own_buffers(norm).items():
                if buffer is not None:
                    own_buffers(norm)[name] = buffer.clone()
        self._inner.__enter__()

    def __exit__(self, *failure: Any) -> None:
        try:
            self._inner.__exit__(*failure)
        finally:
            for norm, buffers in zip(self._norms, self._originals, strict=True):
                own_buffers(norm).update(buffers)
            self._originals = []


def _is_cache(value: Any) -> bool:
    """Whether a value is a key-value cache of transformers (its Cache classes share these names)."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _unfilled(value: Any, layers: Sequence[int]) -> Any:
    """A copy of a key-value cache without the keys and values in it; any other value as it is.

    A block extends the cache it is given, so each run gets a copy of its own: training does not read what comes out.
    The copy takes the same operations as the cache, and holds no other layer's tensors until backward.

    Args:
        layers: indices of the layers that the block consists of; () if it does not say.
    """
    if not _is_cache(value):
        return value
    num_positions = max(_num_positions(value, layer) for layer in layers or (0,))
    if num_positions > 0:
        raise ApplyError(
            f"a block to be recomputed was called with a key-value cache that already holds {num_positions} positions "
            "for it, as generation does; call the model without past_key_values when training"
        )
    return _emptied(value)


def _num_positions(cache: Any, layer: int) -> int:
    try:
        return int(cache.get_seq_length(layer))
    except ValueError:  # transformers: a layer without positions, such as one of linear attention
        return 0


def _emptied(cache: Any) -> Any:
    own = copy.copy(cache)
    for name, value in vars(cache).items():
        if _is_cache(value):
            setattr(own, name, _emptied(value))
        elif isinstance(value, dict):
            setattr(own, name, dict(value))
        elif isinstance(value, list):
            setattr(own, name, [_emptied_layer(layer) for layer in value])
    return own


def _emptied_layer(layer: Any) -> Any:
    own = copy.copy(layer)
    for name, value in list(vars(own).items()) if hasattr(own, "__dict__") else ():
        if isinstance(value, Tensor):
            setattr(own, name, None)
    if hasattr(own, "is_initialized"):
        own.is_initialized = False
    return own
