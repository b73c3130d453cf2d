"""Between Python and the kernels: modes that see every operation, and ways to stay unseen by them."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memwall.torch_internals.names import find, function, kind

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


class StepMode(TorchDispatchMode):
    """Sees operations of a step in which torch.compile may compile; compiled code is one operation."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile."""
        return True


class _StandIn(StepMode):
    """Sees nothing, in the place of a mode that ended within an inference mode."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


_here = threading.local()
"""Holds this thread's stand-in as `stand_in`, or nothing."""


def leave_mode(mode: TorchDispatchMode) -> None:
    """Ends the innermost dispatch mode, which this thread has begun, also within an inference mode begun after it.

    At its end `torch.inference_mode` puts back the dispatch keys that it found (c10/core/InferenceMode.h), the one that
    a mode watches by among them, and without a mode torch fails at the next operation. A mode that sees nothing is
    therefore left there, until `end_stand_in`.
    """
    was_there = _end_innermost_stand_in()
    mode.__exit__(None, None, None)
    if was_there or torch.is_inference_mode_enabled():
        _here.stand_in = _StandIn()  # type: ignore[no-untyped-call]
        _here.stand_in.__enter__()


def end_stand_in() -> None:
    """Ends this thread's stand-in, if there is one and no inference mode; to be called whenever a step may begin."""
    if getattr(_here, "stand_in", None) is not None and not torch.is_inference_mode_enabled():
        _end_innermost_stand_in()


def out_of_inference_mode() -> AbstractContextManager[Any]:
    """Returns a context for what an evaluation finds to be done, and outlives it: autograd saves nothing made there.

    Elsewhere it does nothing: at its end torch's own would switch off the autocast that a plan has begun within it.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def _end_innermost_stand_in() -> bool:
    stand_in = getattr(_here, "stand_in", None)
    if stand_in is None or active_dispatch_modes()[-1] is not stand_in:  # whoever began a mode since ends it first
        return False
    stand_in.__exit__(None, None, None)
    _here.stand_in = None
    return True


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
