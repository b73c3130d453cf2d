"""Operators below autograd: what they are, which kernels they have, and those that torch keeps to itself.

An operator that this torch lacks is `_Absent`: equal to none that runs, and an error when it is called.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NoReturn

from torch import Size, Tensor

from memwall.torch_internals.names import REGISTRY, Name, attribute, error, find, function

schema_of: Callable[[Any], Any] = attribute("torch.ops.aten.add.Tensor._schema", "seeing what an operation writes")
"""Returns the schema of an operator: its arguments, results and what it changes in place.

Raises NotAvailableError without it: no step can be recorded.
"""


@cache
def written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Returns place and name of each argument that an operator changes in place."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema_of(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


packet_of: Callable[[Any], Any] = attribute(
    "torch.ops.aten.add.Tensor._overloadpacket", "telling what an operation is called without its overload"
)
"""Returns the packet of an operator's overloads.

Raises NotAvailableError without it: no step can be recorded.
"""

has_kernel: Callable[[str, str], bool] = function(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "CUDA's lists of autocast on a CPU"
)
"""Returns whether an operator ("aten::exp") has a kernel of its own for a dispatch key ("AutocastCUDA").

Raises NotAvailableError without it: autocast cannot be recorded as CUDA runs it.
"""

library_for_now: Callable[..., AbstractContextManager[Any]] = function(
    "torch.library._scoped_library", "operators on a CPU as CUDA runs them"
)
"""Returns a context with a library whose kernels are registered only within: ("aten", "IMPL").

Raises NotAvailableError without it: steps cannot be recorded as CUDA runs them.
"""

_exclude = function("torch._C._ExcludeDispatchKeyGuard", "CUDA's lists of autocast on a CPU")
_key_set = function("torch._C.DispatchKeySet", "CUDA's lists of autocast on a CPU")
_autocast_cpu = find("torch._C.DispatchKey.AutocastCPU", "CUDA's lists of autocast on a CPU")


def without_cpu_autocast() -> AbstractContextManager[Any]:
    """Returns a context within which autocast, if it is on, casts nothing on a CPU.

    Raises:
        NotAvailableError: this torch has no such context; autocast cannot be recorded as CUDA runs it.
    """
    if _autocast_cpu is None:
        raise error(REGISTRY["torch._C.DispatchKey.AutocastCPU"])
    made: AbstractContextManager[Any] = _exclude(_key_set(_autocast_cpu))
    return made


recurrent_functions: Any = find("torch._VF", "recurrent layers as CUDA runs them")
"""Holds what `nn.LSTM` and its kin call: `lstm`, `gru`, `lstm_cell` and others; None in a torch without it."""

foreach_add_: Callable[..., Any] = function("torch._foreach_add_", "counting the steps of the fused AdamW")
"""Adds a number to each of a list of tensors, in place."""

foreach_div_: Callable[..., Any] = function("torch._foreach_div_", "dividing gradients by a scaler's factor")
"""Divides each of a list of tensors by a tensor of one element, in place."""

flop_formulas: Mapping[Any, Callable[..., int]] = (
    find("torch.utils.flop_counter.flop_registry", "counting floating-point operations") or {}
)
"""How many floating-point operations a packet takes; empty in a torch without it: every operation then counts 0."""

_register_formula = find("torch.utils.flop_counter.register_flop_formula", "counting floating-point operations")


def num_flops(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns how many floating-point operations a call takes; 0 where torch has no formula for its operator."""
    formula = flop_formulas.get(packet_of(operator))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except AssertionError:
        # Torch 2.11 refuses attention whose keys have fewer heads than its queries, each of which serves several.
        num_heads = max((arg.shape[1] for arg in args if isinstance(arg, Tensor) and arg.ndim == 4), default=0)
        if not num_heads:
            raise
        return int(formula(*(_with_heads(arg, num_heads) for arg in args), **kwargs, out_val=out))


def _with_heads(arg: Any, num_heads: int) -> Any:
    """Returns the shape that a tensor of four dimensions would have with so many heads; anything else as it is."""
    if not isinstance(arg, Tensor) or arg.ndim != 4:
        return arg
    return Size((arg.shape[0], num_heads, *arg.shape[2:]))


def flop_formula_of(packet: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that has torch count an operator's floating-point operations by a function of its arguments.

    In a torch without such a registry the function is left as it is.
    """
    if _register_formula is None:
        return lambda formula: formula
    made: Callable[[Callable[..., Any]], Callable[..., Any]] = _register_formula(packet, get_raw=True)
    return made


class _Absent:
    """Stands for an operator that this torch has not."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise error(self._name)


_NEEDED_FOR = {
    "_amp_foreach_non_finite_check_and_unscale_.default": "taking the scale off gradients that are away",
    "_fused_rms_norm.default": "RMSNorms on CUDA under --allow kernels",
    **dict.fromkeys(
        (
            "_local_scalar_dense.default",
            "_ctc_loss.Tensor",
            "_ctc_loss_backward.Tensor",
            "_grouped_mm.default",
        ),
        "following values on fake tensors",
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_cudnn_attention.default",
            "_scaled_dot_product_cudnn_attention_backward.default",
            "_scaled_dot_product_flash_attention.default",
            "_scaled_dot_product_flash_attention_backward.default",
            "_scaled_dot_product_efficient_attention.default",
            "_scaled_dot_product_efficient_attention_backward.default",
            "_scaled_dot_product_attention_math.default",
            "_index_put_impl_.default",
            "_fused_rms_norm_backward.default",
            "_cudnn_rnn.default",
            "_cudnn_rnn_backward.default",
            "_thnn_fused_lstm_cell.default",
            "_thnn_fused_gru_cell.default",
            "_thnn_fused_gru_cell_backward.default",
        ),
        "recording CUDA's kernels on a CPU",
    ),
}


def _overload(name: str, needed_for: str) -> Any:
    path = f"torch.ops.aten.{name}"
    found = find(path, needed_for)
    return _Absent(REGISTRY[path]) if found is None else found


_OPERATORS = {name: _overload(name, needed_for) for name, needed_for in _NEEDED_FOR.items()}


def operator_named(name: str) -> Any:
    """Returns one of ATen's private operators, e.g. "_grouped_mm.default", to compare with or to call.

    Where this torch lacks it, what is returned is equal to no operator that runs, and raises NotAvailableError when it
    is called.

    Raises:
        KeyError: the name is none that this module knows.
    """
    return _OPERATORS[name]
