"""Logits that are not there yet: what a head returns in training, so that a loss can take hidden states in their place.

A model multiplies its last hidden states with the head, casts, shifts and reshapes the result, and hands it to
`torch.nn.functional.cross_entropy`. `DeferredLogits` remember the product's factors and go along with all of that;
cross entropy of them is `linear_cross_entropy`, which never holds them whole. Whatever else is asked of them is
computed as it always was, from logits made at that moment.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memwall.triton_kernels import linear_cross_entropy

__all__ = ["DeferredLogits", "LossCounts", "Product"]


class LossCounts:
    """How often a head's logits were spared, and who asked for them all the same."""

    def __init__(self) -> None:
        self.num_losses = 0
        """Losses computed without logits."""
        self.asked_by = ""
        """The function that last needed the logits themselves."""


class Product(NamedTuple):
    """What a head would have computed."""

    hidden: Tensor
    """[..., H]: what the head was called with, as the model has reshaped its logits since."""
    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    dtype: torch.dtype
    """That it computes in: under autocast not the factors' own."""
    chunk_rows: int
    """Rows whose logits a loss may hold at a time."""
    counts: LossCounts

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias in one dtype."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias


class DeferredLogits(Tensor):
    """hidden weight^T + bias, [..., V], not computed until somebody needs it."""

    product: Product

    @staticmethod
    def of(product: Product, dtype: torch.dtype | None = None) -> "DeferredLogits":
        """Logits that seem to be of `dtype`; None for the product's own."""
        hidden, weight = product.hidden, product.weight
        factors = (hidden, weight, product.bias)
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits,
            (*hidden.shape[:-1], weight.shape[0]),
            dtype=dtype or product.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in factors),
        )
        made.product = product
        return made

    def computed(self) -> Tensor:
        """The logits themselves, as a tensor of the model's graph."""
        with torch.autocast(self.product.hidden.device.type, enabled=False):
            return F.linear(*self.product.factors()).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls in place of its functions, methods and properties."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIPTIONS:
                return func(*args, **kwargs)
            rule, first = _RULES.get(func), args[0] if args else kwargs.get("input")
            found = None if rule is None or not isinstance(first, cls) else rule(*args, **kwargs)
        if found is not None:
            return found
        if func is Tensor.untyped_storage:
            raise NotImplementedError("deferred logits have no storage")
        return _with_logits(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch writes dict[Any, Any] for what may be None
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Where code below torch's functions meets them."""
        return _with_logits(func, args, kwargs or {})


def _with_logits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives for the logits themselves."""

    def computed(logits: DeferredLogits) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            logits.product.counts.asked_by = getattr(func, "__name__", str(func))
            return logits.computed()

    args, kwargs = tree_map_only(DeferredLogits, computed, (args, kwargs))
    return func(*args, **kwargs)


# Asked of a tensor without asking for its values.
_DESCRIPTIONS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse")
    ),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "nbytes", "itemsize")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.get_device),
    *(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel),
}


def _rearranged(logits: DeferredLogits, hidden: Tensor) -> DeferredLogits:
    return DeferredLogits.of(logits.product._replace(hidden=hidden), logits.dtype)


def _cast(logits: DeferredLogits, dtype: Any = None, *other: Any, **options: Any) -> DeferredLogits | None:
    """To another dtype on the same device; what a loss is computed in is fp32 in any case."""
    if isinstance(dtype, str | torch.device) and not other and torch.device(dtype) == logits.device:
        dtype = logits.dtype
    if other or options or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return DeferredLogits.of(logits.product, dtype)


def _reshaped(logits: DeferredLogits, *shape: Any, **options: Any) -> DeferredLogits | None:
    """To other leading dimensions."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if options or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    hidden, (num_rows, num_columns) = logits.product.hidden, (logits.shape[:-1].numel(), logits.shape[-1])
    *leading, last = sizes
    if last != num_columns and not (last == -1 and prod(leading) == num_rows and -1 not in leading):
        return None
    return _rearranged(logits, hidden.reshape(*leading, hidden.shape[-1]))


def _part(logits: DeferredLogits, key: Any) -> DeferredLogits | None:
    """Whole rows, as those that have a next token."""
    keys = key if isinstance(key, tuple) else (key,)
    has_rest = any(part is Ellipsis for part in keys)
    if not all(part is Ellipsis or isinstance(part, slice) for part in keys) or sum(k is Ellipsis for k in keys) > 1:
        return None
    reaches_last = (has_rest and keys[-1] is not Ellipsis) or len(keys) == logits.dim()
    if reaches_last and keys[-1] != slice(None):
        return None
    return _rearranged(logits, logits.product.hidden[key])


def _cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    logits = input  # torch's name for it
    is_indices = target.dim() == 1 and not target.is_floating_point()
    if logits.dim() != 2 or not is_indices or any(value is not None for value in (weight, size_average, reduce)):
        return None
    product = logits.product
    with torch.autocast(logits.device.type, enabled=False):
        hidden, head, bias = product.factors()
        loss = linear_cross_entropy(
            hidden,
            head,
            target,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            chunk_rows=product.chunk_rows,
        )
    product.counts.num_losses += 1
    cast: Tensor = loss.to(logits.dtype)
    return cast


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.float: lambda logits, **options: _cast(logits, torch.float32, **options),
    Tensor.to: _cast,
    Tensor.contiguous: lambda logits, **options: None if options else logits,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    Tensor.__getitem__: _part,
}
