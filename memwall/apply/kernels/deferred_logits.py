"""Logits that are not there yet: what a head returns in training, so that a loss can take hidden states in their place.

A model multiplies its last hidden states with the head, casts, scales, shifts and reshapes the result, and hands it to
`torch.nn.functional.cross_entropy`. `DeferredLogits` remember the product's factors and go along with all of that;
cross entropy of them is `linear_cross_entropy`, which never holds them whole. Whatever else is asked of them is
computed as it always was, from logits made at that moment, which are the same from then on.
"""

import weakref
from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.apply.kernels.deferred_product import (
    DeferredGradient,
    Product,
    check_unchanged,
    versions_of,
)
from memwall.torch_internals.dispatch import make_wrapper, without_subclass_functions
from memwall.torch_internals.operators import schema_of
from memwall.torch_internals.trees import tree_map_only
from memwall.triton_kernels import linear_cross_entropy


class DeferredLogits(Tensor):
    """Stands for hidden weight^T + bias, [..., V], which is not computed until somebody needs it.

    From then on they are there, with all that was made of them and is still in use: what is written into them later is
    written into views of them as well.
    """

    product: Product
    versions: tuple[int, ...]
    _make: Callable[[], Tensor] | None
    """Computes them; None once they are there."""
    _made: Tensor | None
    _family: list[weakref.ref["DeferredLogits"]]
    """Lists them in the order in which they were made of each other."""

    @staticmethod
    def of(
        product: Product,
        dtype: torch.dtype | None = None,
        *,
        parent: "DeferredLogits | None" = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> "DeferredLogits":
        """Returns the logits that seem to be of `dtype`; None for the product's own.

        Args:
            parent: the logits that these were made of, by `change`.
        """
        hidden, weight = product.hidden, product.weight
        seen = dtype or product.dtype

        def wrapper() -> Tensor:
            made: Tensor = make_wrapper(
                DeferredLogits, (*hidden.shape[:-1], weight.shape[0]), dtype=seen, device=hidden.device
            )
            return made

        made = DeferredGradient.apply(  # type: ignore[no-untyped-call]
            wrapper, product, seen, hidden, weight, product.bias
        )
        assert isinstance(made, DeferredLogits)
        made.product, made.versions, made._made = product, versions_of(product), None
        if parent is None or change is None:
            made._make, made._family = product.logits, []
        else:
            made._make, made._family = lambda: change(parent.computed()), parent._family
        made._family.append(weakref.ref(made))
        return made

    @property
    def is_there(self) -> bool:
        """Returns whether they were computed."""
        return self._made is not None

    def computed(self) -> Tensor:
        """Returns the logits themselves, in the model's graph; with them comes all that was made of the same head.

        Raises:
            ApplyError: a factor of theirs was written in place since.
        """
        if self._made is None:
            for reference in self._family:
                member = reference()
                if member is not None:
                    member._compute()
        assert self._made is not None
        return self._made

    def values(self) -> Tensor:
        """Returns what they contain, to be read."""
        return self._made if self._made is not None else self._afresh()

    def _compute(self) -> None:
        if self._make is not None:
            check_unchanged(self.product, self.versions)
            make, self._make = self._make, None
            with torch.set_grad_enabled(self.requires_grad):
                self._made = make()

    def _afresh(self) -> Tensor:
        check_unchanged(self.product, self.versions)
        return self.product.logits().to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stands in for torch's functions, methods and properties."""
        kwargs = kwargs or {}
        with without_subclass_functions():
            if func in _DESCRIPTIONS:
                return func(*args, **kwargs)
            found = _without_values(func, args, kwargs)
        if found is not None:
            return found
        if func is Tensor.untyped_storage:
            raise NotImplementedError("deferred logits have no storage")
        return _with_logits(func, args, kwargs, DeferredLogits.computed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch writes dict[Any, Any] for what may be None
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Serves code below torch's functions: autograd is done there, so logits stay as they are."""
        if schema_of(func).is_mutable:
            raise NotImplementedError(f"{func} writes into logits that are not there; leave out --allow kernels")
        return _with_logits(func, args, kwargs or {}, DeferredLogits.values)


def _without_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns what a function gives for logits that stay uncomputed; None where it needs them or has them."""
    logits = args[0] if args else kwargs.get("input")
    if func not in (_CHANGES.keys() | {F.cross_entropy}) or not isinstance(logits, DeferredLogits) or logits.is_there:
        return None
    check_unchanged(logits.product, logits.versions)
    if func is F.cross_entropy:
        return _cross_entropy(*args, **kwargs)
    changed = _CHANGES[func](*args, **kwargs)
    if changed is None:
        return None
    return DeferredLogits.of(*changed, parent=logits, change=lambda values: func(values, *args[1:], **kwargs))


def _with_logits(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Callable[[DeferredLogits], Tensor],
) -> Any:
    """Returns what a function gives for the logits themselves."""

    def computed(logits: DeferredLogits) -> Tensor:
        with without_subclass_functions():
            logits.product.counts.asked_by = getattr(func, "__name__", str(func))
            return of(logits)

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


# The product, and the dtype, that logits seem to have afterwards; None where a change needs their values.
_Changed = tuple[Product, torch.dtype] | None


def _cast(logits: DeferredLogits, dtype: Any = None, *other: Any, **options: Any) -> _Changed:
    """Casts to another dtype on the same device; what a loss is computed in is fp32 in any case."""
    if isinstance(dtype, str | torch.device) and not other and torch.device(dtype) == logits.device:
        dtype = logits.dtype
    if other or options or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return logits.product, dtype


def _reshaped(logits: DeferredLogits, *shape: Any, **options: Any) -> _Changed:
    """Reshapes to other leading dimensions."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if options or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    hidden, (num_rows, num_columns) = logits.product.hidden, (logits.shape[:-1].numel(), logits.shape[-1])
    *leading, last = sizes
    if last != num_columns and not (last == -1 and prod(leading) == num_rows and -1 not in leading):
        return None
    return logits.product._replace(hidden=hidden.reshape(*leading, hidden.shape[-1])), logits.dtype


def _part(logits: DeferredLogits, key: Any) -> _Changed:
    """Takes whole rows, as those that have a next token."""
    keys = key if isinstance(key, tuple) else (key,)
    has_rest = any(part is Ellipsis for part in keys)
    if not all(part is Ellipsis or isinstance(part, slice) for part in keys) or sum(k is Ellipsis for k in keys) > 1:
        return None
    reaches_last = (has_rest and keys[-1] is not Ellipsis) or len(keys) == logits.dim()
    if reaches_last and keys[-1] != slice(None):
        return None
    return logits.product._replace(hidden=logits.product.hidden[key]), logits.dtype


def _scaled(logits: DeferredLogits, factor: Any, **options: Any) -> _Changed:
    """Scales by a positive number."""
    if options or type(factor) not in (int, float) or not 0.0 < factor < inf:
        return None
    product = logits.product
    softcap = None if product.softcap is None else product.softcap * factor
    return product._replace(scale=product.scale * factor, softcap=softcap), logits.dtype


def _divided(logits: DeferredLogits, divisor: Any, **options: Any) -> _Changed:
    return _scaled(logits, 1.0 / divisor, **options) if type(divisor) in (int, float) and divisor else None


def _bounded(logits: DeferredLogits) -> _Changed:
    """Bounds by tanh, once."""
    return (logits.product._replace(softcap=1.0), logits.dtype) if logits.product.softcap is None else None


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
            softcap=product.softcap,
            logit_scale=product.scale,
        )
    product.counts.num_losses += 1
    cast: Tensor = loss.to(logits.dtype)
    return cast


_CHANGES: dict[Any, Callable[..., _Changed]] = {
    Tensor.float: lambda logits, **options: _cast(logits, torch.float32, **options),
    Tensor.to: _cast,
    Tensor.contiguous: lambda logits, **options: None if options else (logits.product, logits.dtype),
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    Tensor.__getitem__: _part,
    **dict.fromkeys((Tensor.mul, Tensor.__rmul__, torch.mul), _scaled),
    **dict.fromkeys((Tensor.div, torch.div), _divided),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _bounded),
}
