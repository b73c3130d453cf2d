"""A parameter on disk, for everybody but its own block, is the same object, which is fetched when it is used.

While it is away, and also while it happens to be in memory, its class is `GuardedParameter`: code that touches it
passes through here. Within its block's forward it is the plain parameter that it was.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memwall.errors import NotAvailableError
from memwall.torch_internals.autograd import execution_is_transformed
from memwall.torch_internals.dispatch import reading_no_elements, without_subclass_functions
from memwall.torch_internals.trees import tree_leaves


class Guard(Protocol):
    """Keeps a parameter away from memory."""

    name: str

    def use(self, others: Sequence["Guard"], run: Callable[[], Any]) -> Any:
        """Runs code that uses the parameter, and those of `others`, with all of them in memory."""

    def replace(self, run: Callable[[], Any], new: Any, *, is_passing: bool) -> Any:
        """Runs code that gives the parameter other memory, takes over the values, or refuses.

        Args:
            new: the tensor that it is to be; None where there is none.
            is_passing: nobody else holds that tensor, so that its values are all there is to it.
        """

    def show(self, run: Callable[[], Any]) -> Any:
        """Runs code that makes another tensor over the parameter's memory, to be read or written later."""

    def get_gradient(self) -> Tensor | None:
        """Returns what `parameter.grad` is."""

    def set_gradient(self, value: Tensor | None) -> None:
        """Assigns `parameter.grad`."""


_guards: dict[int, Guard] = {}


def guarded(parameter: nn.Parameter, guard: Guard) -> None:
    """Makes every use of a parameter pass through its guard."""
    _guards[id(parameter)] = guard
    parameter.__class__ = GuardedParameter


def unguarded(parameter: nn.Parameter) -> None:
    """Makes it the plain parameter again."""
    parameter.__class__ = nn.Parameter
    _guards.pop(id(parameter), None)


class GuardedParameter(nn.Parameter):
    """Is a parameter whose elements may be on disk."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_subclass_functions():
            if func in _WITHOUT_ELEMENTS:
                return func(*args, **kwargs)
            used = [_guards[id(v)] for v in _unique(tree_leaves((args, kwargs))) if id(v) in _guards]
            if not used:
                return func(*args, **kwargs)
            if func in _ON_GRADIENT:
                return _ON_GRADIENT[func](used[0], *args[1:])
            if func in _REPLACING:
                if len(args) > 1 and args[1] is args[0]:
                    return None  # .to() and .float() where nothing is to be changed
                new = args[1] if func == _Tensor.data.__set__ else None
                is_passing = new is not None and sys.getrefcount(new) <= _REFERENCES_OF_PASSING
                return used[0].replace(lambda: func(*args, **kwargs), new, is_passing=is_passing)
            if func in _SHARING:
                return used[0].show(lambda: func(*args, **kwargs))
            return used[0].use(used[1:], lambda: func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = self._as_plain(lambda: copy.deepcopy(self, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain(lambda: self.__reduce_ex__(protocol))

    def _as_plain(self, run: Callable[[], Any]) -> Any:
        """Runs code that asks for the class."""

        def run_plain() -> Any:
            self.__class__ = nn.Parameter  # type: ignore[assignment]
            try:
                return run()
            finally:
                self.__class__ = GuardedParameter

        return _guards[id(self)].use((), run_plain)


def _unique(values: Sequence[Any]) -> list[Any]:
    return [v for v in {id(value): value for value in values}.values() if isinstance(v, GuardedParameter)]


_Tensor: Any = Tensor  # whose descriptors type checkers take for values


def _properties(*names: str) -> list[Any]:
    """Returns their getters; not every version of torch has each."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


_WITHOUT_ELEMENTS = frozenset(
    (
        *_properties("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim"),
        *_properties("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "names"),
        *_properties("output_nr", "is_nested", "is_mkldnn"),
        _Tensor.requires_grad.__set__,
        *reading_no_elements(),
        *(Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.element_size, Tensor.__len__),
        *(Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.data_ptr),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.get_device),
        *(Tensor.is_conj, Tensor.is_neg, Tensor.is_inference, Tensor.is_pinned, Tensor.is_shared),
        torch.autograd.grad,  # blocks bring in what it needs
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor),
    )
)
_REPLACING = frozenset((_Tensor.data.__set__, Tensor.set_, Tensor.resize_, Tensor.share_memory_))
_SHARING = frozenset((_Tensor.data.__get__, Tensor.detach))
_ON_GRADIENT: dict[Any, Callable[..., Any]] = {
    _Tensor.grad.__get__: lambda guard, *_: guard.get_gradient(),
    _Tensor.grad.__set__: lambda guard, value: guard.set_gradient(value),
    _Tensor.grad.__delete__: lambda guard: guard.set_gradient(None),
}


class _Counting(nn.Parameter):
    """Counts who refers to a tensor that is assigned to its data, and gets no name where that is done.

    It is not assigned: this module may be imported first within a transform of torch.func, which forbids that.
    """

    num_references = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_subclass_functions():
            if func != _Tensor.data.__set__:
                return func(*args, **kwargs)
            new = args[1]
            cls.num_references = sys.getrefcount(new)
            return None


def _references_of_passing() -> int:
    """Returns what refers to a tensor that is assigned where it is computed, and held by nobody else.

    It is 0, which is so of none, where a tensor that a variable holds has no more: Python 3.14 lends it. So it is where
    this torch cannot guard a parameter at all, and where this module is imported within a transform of torch.func, in
    which nobody may assign: no plan moves parameters in such a run.
    """
    probe, held = _Counting(torch.empty(1)), torch.empty(1)
    try:
        if execution_is_transformed():
            return 0
        probe.data = held
    except NotAvailableError:
        return 0
    num_of_held = _Counting.num_references
    probe.data = torch.empty(1)
    num_of_passing = _Counting.num_references
    return num_of_passing if num_of_passing < num_of_held else 0


_REFERENCES_OF_PASSING = _references_of_passing()  # here: within a function of a subclass torch calls no other
