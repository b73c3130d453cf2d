"""Between Python and the kernels: modes that see every operation, and ways to stay unseen by them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from memwall.torch_internals.names import find, function, kind

__all__ = [
    "TorchDispatchMode",
    "active_dispatch_modes",
    "disabled_torch_function",
    "has_modes",
    "make_wrapper",
    "reading_no_elements",
    "without_dispatch",
    "without_dispatch_modes",
    "without_function_modes",
    "without_subclass_functions",
]

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = kind("torch.utils._python_dispatch.TorchDispatchMode", "recording a step")
    """The base of what sees every operation below autograd; without it no step can be recorded."""

without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = function(
    "torch.utils._python_dispatch._disable_current_modes", "moving tensors unseen by a recorder"
)
"""Returns a context in which no dispatch mode sees an operation.

Raises NotAvailableError without it: state, gradients and saved tensors cannot be moved while a step is recorded.
"""

without_dispatch: Callable[[], AbstractContextManager[Any]] = function(
    "torch._C._DisableTorchDispatch", "computing with real values beside fake ones"
)
"""Returns a context in which neither modes nor subclasses of tensors see an operation.

Raises NotAvailableError without it: steps cannot be recorded on fake tensors.
"""

without_function_modes: Callable[[], AbstractContextManager[Any]] = function(
    "torch._C.DisableTorchFunction", "moving tensors unseen by modes"
)
"""Returns a context in which no `__torch_function__` is called, of a mode or of a subclass."""

without_subclass_functions: Callable[[], AbstractContextManager[Any]] = function(
    "torch._C.DisableTorchFunctionSubclass", "looking at parameters on disk without fetching them"
)
"""Returns a context in which no `__torch_function__` of a subclass is called."""

disabled_torch_function: Any = function(
    "torch._C._disabled_torch_function_impl", "gradients on disk, as a kind of tensor,"
)
"""The `__torch_function__` of a subclass that leaves everything to `__torch_dispatch__`."""

_num_function_modes = function("torch._C._len_torch_function_stack", "telling whether somebody watches operations")
_num_dispatch_modes = function("torch._C._len_torch_dispatch_stack", "telling whether somebody watches operations")


def has_modes() -> bool:
    """Returns whether any mode sees this thread's operations.

    Raises:
        NotAvailableError: this torch does not tell; saved tensors cannot be moved then.
    """
    return bool(_num_function_modes() or _num_dispatch_modes())


active_dispatch_modes: Callable[[], list[Any]] = function(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "marking CUDA's attention calls in a recording"
)
"""Returns the dispatch modes that see this thread's operations, outermost first.

Raises NotAvailableError without it: attention cannot be recorded as CUDA runs it.
"""

make_wrapper: Callable[..., Any] = function(
    "torch.Tensor._make_wrapper_subclass", "tensors that stand for others (gradients on disk, deferred logits)"
)
"""Returns a tensor of a subclass without memory: (class, size, *, strides, dtype, device).

Raises NotAvailableError without it.
"""

_WATCHED = "looking at parameters on disk without fetching them"
_PROPERTIES = [
    find(f"torch.Tensor.{name}", _WATCHED) for name in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
]
_is_view = find("torch.Tensor._is_view", _WATCHED)


def reading_no_elements() -> list[Any]:
    """Returns the private getters, setters and methods of tensors that read no element; those that this torch has."""
    accessors = [
        accessor
        for found in _PROPERTIES
        if found is not None
        for accessor in (found.__get__, getattr(found, "__set__", None))
        if accessor is not None
    ]
    return [*accessors, *([] if _is_view is None else [_is_view])]
