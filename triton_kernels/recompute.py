"""Recompute handles: what a following layer would save for backward is replaced by the recipe to rebuild it.

    with recompute_handles():
        loss = model(batch)
    loss.backward()

An operation of this package publishes how its result is rebuilt, bit by bit, from what its own backward keeps anyway.
When a layer, of whatever library, then saves that result or a view of it, the recipe is saved in its place. Nothing is
rewritten in the model; a result that somebody else holds as well is not freed by this. Label: *bit-exact*.

torch calls only the innermost saved-tensor hooks, so handles take another pair along (`otherwise`), and publish nothing
inside a checkpointed block, which keeps nothing in the first place. Under `torch.compile` nothing is published either:
its partitioner recomputes such results by itself.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memwall.errors import ApplyError
from memwall.torch_internals.autograd import innermost_saved_tensor_hooks, version_of
from memwall.torch_internals.dispatch import is_wrapper
from memwall.torch_internals.storages import StorageWeakRef, identity_of

__all__ = ["RecomputeHandles", "RecomputeModifiedError", "publish", "recompute_handles"]

_THREAD = threading.local()


class RecomputeModifiedError(ApplyError, RuntimeError):
    """Says that a tensor that backward needs was written in place after forward, as autograd's RuntimeError does."""


class SavedTensorHooks(Protocol):
    """Takes the tensors that have no recipe, e.g. an activation offload."""

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd stores."""

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor again."""


class _Kept(NamedTuple):
    """Holds a tensor that stays where it is; torch's own check of its version ends where hooks begin."""

    tensor: Tensor
    version: int | None


class _Keep:
    """Is the hooks for tensors without a recipe where the caller has none."""

    def pack(self, tensor: Tensor) -> _Kept:
        # A result that its own operation saves would hold its graph, and the graph it.
        return _Kept(tensor if tensor.grad_fn is None else tensor.detach(), _version(tensor))

    def unpack(self, packed: _Kept) -> Tensor:
        if _version(packed.tensor) != packed.version:
            raise _modified(packed.tensor, packed.version)
        return packed.tensor


class _Recipe(NamedTuple):
    """Tells how a result that may still be alive is rebuilt."""

    result: StorageWeakRef
    """While this lives, no other storage can take its address."""
    dtype: torch.dtype
    num_bytes: int
    version: int
    rebuild: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    input_versions: tuple[int | None, ...]

    def is_valid_for(self, tensor: Tensor) -> bool:
        """Tells whether neither the result nor an input was written since, and `tensor` has the result's elements."""
        versions = tuple(_version(value) for value in self.inputs)
        return tensor.dtype == self.dtype and version_of(tensor) == self.version and versions == self.input_versions


class _Result:
    """Holds one result that is to be rebuilt, once for all that saved it."""

    def __init__(self, rebuild: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self.rebuild, self.inputs = rebuild, inputs
        self.value: Tensor | None = None
        self.handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self.waiting: weakref.WeakSet[_Handle] = weakref.WeakSet()
        """Backward has not asked for these handles since the last rebuild."""


class _Handle:
    """Is stored by autograd in place of one saved view of a result."""

    __slots__ = ("__weakref__", "layout", "result")

    def __init__(self, result: _Result, tensor: Tensor) -> None:
        self.result = result
        self.layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
        result.handles.add(self)
        result.waiting.add(self)


class RecomputeHandles:
    """Is a context inside which saved results of this package's operations are replaced by their recipes.

    Args:
        otherwise: hooks for all other tensors, and for what recipes need; None keeps them.
    """

    def __init__(self, otherwise: SavedTensorHooks | None = None) -> None:
        self._otherwise: SavedTensorHooks = _Keep() if otherwise is None else otherwise
        self._recipes: dict[int, _Recipe] = {}
        self._results: dict[int, weakref.ref[_Result]] = {}
        self._hooks: list[saved_tensors_hooks] = []
        self._outer: list[RecomputeHandles | None] = []
        self.num_replaced = 0
        """Saved references that became a recipe."""
        self.dropped_bytes = 0
        """The results behind them have so many bytes, each counted once; freed unless somebody else holds them."""
        self.num_rebuilt = 0
        """Results that backward has asked for: one for each, whatever the number of layers that saved it."""

    def __enter__(self) -> Self:
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        self._outer.append(getattr(_THREAD, "handles", None))
        _THREAD.handles = self
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.handles = self._outer.pop()
        self._hooks.pop().__exit__(*error)
        if not self._hooks:
            # Recipes hold what they rebuild from; from here on only saved handles may.
            self._recipes.clear()
            self._results.clear()

    def publish(self, result: Tensor, rebuild: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        """Remembers how `result`, contiguous and alone in its storage, is rebuilt; forgets results that died."""
        self._forget_the_dead()
        storage = result.untyped_storage()
        self._results.pop(identity_of(storage), None)
        self._recipes[identity_of(storage)] = _Recipe(
            StorageWeakRef(storage),
            result.dtype,
            result.nbytes,
            version_of(result),
            rebuild,
            tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs),
            tuple(_version(value) for value in inputs),
        )

    def pack(self, tensor: Tensor) -> Any:
        """Is the hook that autograd calls with what it saves."""
        self._forget_the_dead()
        if not _is_plain(tensor):
            return self._otherwise.pack(tensor)
        address = identity_of(tensor.untyped_storage())
        recipe = self._recipes.get(address)
        if recipe is None or not recipe.is_valid_for(tensor):
            return self._otherwise.pack(tensor)
        reference = self._results.get(address)
        result = None if reference is None else reference()
        if result is None:
            result = _Result(
                recipe.rebuild,
                tuple(self._packed(value) if isinstance(value, Tensor) else value for value in recipe.inputs),
            )
            self._results[address] = weakref.ref(result)
            self.dropped_bytes += recipe.num_bytes
        self.num_replaced += 1
        return _Handle(result, tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor as it was saved: the same bits, shape and strides.

        Raises:
            RecomputeModifiedError: what it is rebuilt from was written in place in between.
        """
        if not isinstance(packed, _Handle):
            return self._otherwise.unpack(packed)
        result = packed.result
        if result.value is None:
            inputs = (self.unpack(value.value) if isinstance(value, _Packed) else value for value in result.inputs)
            with torch.no_grad():
                result.value = result.rebuild(*inputs)
            self.num_rebuilt += 1
            result.waiting = weakref.WeakSet(result.handles)
        value = result.value.as_strided(*packed.layout)
        result.waiting.discard(packed)
        # The first that asks rebuilds, the last takes it along.
        if not result.waiting:
            result.value = None
        return value

    def _packed(self, tensor: Tensor) -> "_Packed":
        return _Packed(self.pack(tensor))

    def _forget_the_dead(self) -> None:
        for address in [address for address, recipe in self._recipes.items() if recipe.result.expired()]:
            del self._recipes[address]
            self._results.pop(address, None)


class _Packed(NamedTuple):
    """Holds a tensor that a recipe needs, as the hooks packed it."""

    value: Any


def recompute_handles(otherwise: SavedTensorHooks | None = None) -> RecomputeHandles:
    """Returns a context for the forward of a step.

    Args:
        otherwise: hooks for tensors without a recipe, e.g. an activation offload; None keeps them.

    >>> from memwall.triton_kernels import recompute_handles, swiglu
    >>> gate = torch.ones(2, 4, requires_grad=True)
    >>> with recompute_handles() as handles:
    ...     _ = torch.nn.Linear(4, 4)(swiglu(gate, gate))
    >>> handles.num_replaced, handles.dropped_bytes
    (1, 32)
    """
    return RecomputeHandles(otherwise)


def publish(result: Tensor, rebuild: Callable[..., Tensor], *inputs: Any) -> None:
    """Tells the handles in effect, if there are any, that `rebuild(*inputs)` gives `result` again, bit by bit."""
    if torch.compiler.is_compiling():
        return
    handles: RecomputeHandles | None = getattr(_THREAD, "handles", None)
    if handles is None or not result.requires_grad or not _is_plain(result):
        return
    innermost = innermost_saved_tensor_hooks()
    if innermost is not None and innermost[0] == handles.pack:
        handles.publish(result, rebuild, inputs)


def _is_plain(tensor: Tensor) -> bool:
    return not (tensor.is_inference() or tensor.layout != torch.strided or is_wrapper(tensor))


def _version(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) and not value.is_inference() else None


def _modified(tensor: Tensor, version: int | None) -> RecomputeModifiedError:
    return RecomputeModifiedError(
        f"a tensor needed for backward was modified in place after the forward saved it: {tensor.dtype} "
        f"{list(tensor.shape)} is at version {version_of(tensor)}, expected {version}. Replace the in-place operation "
        "by one that returns a new tensor, or write into a clone()"
    )
