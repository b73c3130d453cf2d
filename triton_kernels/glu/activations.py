"""`swiglu` and `geglu`: activation(gate) * up in one pass, without the activated gate that eager keeps for backward.

Everything is fp32 inside and rounded once per result. Label of the action: *equivalent* (eager rounds the activated
gate as well).
"""

from typing import Any, Literal

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._launch import half_for
from .._rows import DTYPES, as_rows

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up.

    Args:
        gate: [..., I], any strides; without `up` [..., 2 I], gate and up side by side.
        up: the shape of `gate`. Another dtype is promoted, as torch does.

    Raises:
        UsageError: shapes, dtypes or devices do not fit together.

    >>> swiglu(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 0.5]))
    tensor([0.0000, 0.8808])
    """
    return _glu("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Returns gelu(gate) * up; arguments and errors are those of `swiglu`.

    Args:
        gate: [..., I], any strides; without `up` [..., 2 I].
        up: the shape of `gate`.
        approximate: by the error function, or by tanh, as `torch.nn.functional.gelu`.

    >>> geglu(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 0.5]), approximate="tanh")
    tensor([0.0000, 0.9773])
    """
    if approximate not in _GELUS:
        raise UsageError(f"approximate is 'none' or 'tanh', not {approximate!r}")
    return _glu("geglu", gate, up, _GELUS[approximate])


def _glu(name: str, gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
            raise UsageError(
                f"{name} of one tensor wants [..., 2 I], gate and up side by side; found {list(gate.shape)}"
            )
    elif gate.shape != up.shape or gate.dim() == 0 or gate.device != up.device:
        raise UsageError(
            f"{name} wants gate and up of one shape [..., I] on one device, found {list(gate.shape)} on {gate.device} "
            f"and {list(up.shape)} on {up.device}"
        )
    found = [gate.dtype] if up is None else [gate.dtype, up.dtype]
    if not set(found) <= set(DTYPES):
        raise UsageError(f"{name} wants floating dtypes of 16 to 64 bits, found {', '.join(map(str, found))}")
    product: Tensor = packed_glu_op(gate, kind) if up is None else glu_op(gate, up, kind)
    return product


@torch.library.custom_op("memwall::glu", mutates_args=())
def glu_op(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Returns activation(gate) * up, contiguous, in the promoted dtype; `kind` is silu, gelu or gelu_tanh."""
    product = _empty_product(gate, up)
    if product.numel() > 0:
        half_for(product, __package__, "glu")(as_rows(gate), as_rows(up), as_rows(product), kind)
    return product


@glu_op.register_fake
def _(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _empty_product(gate, up)


@torch.library.custom_op("memwall::packed_glu", mutates_args=())
def packed_glu_op(packed: Tensor, kind: str) -> Tensor:
    """Returns `glu_op` of the two halves of `packed`."""
    gate, up = packed.chunk(2, -1)
    product = _empty_product(gate, up)
    if product.numel() > 0:
        rows = as_rows(packed)
        half_for(product, __package__, "glu")(*rows.chunk(2, -1), as_rows(product), kind)
    return product


@packed_glu_op.register_fake
def _(packed: Tensor, kind: str) -> Tensor:
    return _empty_product(*packed.chunk(2, -1))


@torch.library.custom_op("memwall::glu_backward", mutates_args=())
def glu_backward_op(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Returns gradients of `glu_op` for gate and up, contiguous."""
    grad_gate, grad_up = _contiguous_like(gate), _contiguous_like(up)
    if gate.numel() > 0:
        inputs = (as_rows(tensor) for tensor in (grad, gate, up))
        half_for(grad, __package__, "glu_backward")(*inputs, as_rows(grad_gate), as_rows(grad_up), kind)
    return grad_gate, grad_up


@glu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _contiguous_like(gate), _contiguous_like(up)


@torch.library.custom_op("memwall::packed_glu_backward", mutates_args=())
def packed_glu_backward_op(grad: Tensor, packed: Tensor, kind: str) -> Tensor:
    """Returns the gradient of `packed_glu_op`, contiguous."""
    result = _contiguous_like(packed)
    if packed.numel() > 0:
        half_for(grad, __package__, "glu_backward")(
            as_rows(grad), *as_rows(packed).chunk(2, -1), *as_rows(result).chunk(2, -1), kind
        )
    return result


@packed_glu_backward_op.register_fake
def _(grad: Tensor, packed: Tensor, kind: str) -> Tensor:
    return _contiguous_like(packed)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_glu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *glu_backward_op(grad, *ctx.saved_tensors, ctx.kind), None


def _backward_of_packed_glu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return packed_glu_backward_op(grad, *ctx.saved_tensors, ctx.kind), None


glu_op.register_autograd(_backward_of_glu, setup_context=_setup)
packed_glu_op.register_autograd(_backward_of_packed_glu, setup_context=_setup)


def _empty_product(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
