"""Where torch's fake results are not laid out like real ones: one rule per operator, each with its source.

Found by recording the same steps live and on fake tensors (torch 2.13); a rule that torch makes superfluous changes
nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.patches import Patches
from memwall.torch_internals.operators import operator_named
from memwall.trace import recurrent

_aten = torch.ops.aten
_GROUPED_MM = operator_named("_grouped_mm.default")
_CTC_LOSS_BACKWARD = operator_named("_ctc_loss_backward.Tensor")


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on fake tensors, also where torch has no fake version or one that refuses what kernels do."""
    if func is _GROUPED_MM and args[0].dtype not in (torch.bfloat16, torch.float16):
        return _grouped_mm(func, args, kwargs)
    if func is _CTC_LOSS_BACKWARD:  # aten/src/ATen/native/LossCTC.cpp: as its `log_probs`, contiguous
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    return func(*args, **kwargs)


def as_real(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Returns the result of an operation with the strides and the storage that its kernels give it."""
    rule = _RULES.get(func)
    return out if rule is None else rule(args, out)


@contextmanager
def biases_in_place() -> Iterator[None]:
    """Has a linear layer of what is not contiguous add its bias in place, as it does in a plain step.

    Under a mode that watches operations torch adds it into a new tensor instead. Where autocast casts, it still does,
    which `memwall.predict.in_place` puts right.

    Source: aten/src/ATen/native/Linear.cpp, `linear` (`isTensorSubclassLike` holds under any dispatch mode).
    """

    def linear(original: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_whole = input.dim() < 3 or input.is_contiguous()
        if bias is None or is_whole or torch.is_autocast_enabled(input.device.type):
            return original(input, weight, bias)
        return torch.matmul(input, weight.t()).add_(bias)

    with Patches("records a step under a dispatch mode") as patches:
        patches.wrap(F, "linear", linear)
        yield


def _shrunk(args: tuple[Any, ...], out: Tensor) -> Tensor:
    """Returns a reduced loss as allocated: as large as the input and shrunk, it holds those bytes until it dies.

    Source: aten/src/ATen/native/BinaryOps.cpp and PointwiseOps, structured meta functions of `mse_loss` and
    `smooth_l1_loss` (`build_borrowing_binary_op(maybe_get_output(), ...)`, whatever the reduction).
    """
    return (args[0] - args[1]).as_strided((), ()) if out.dim() == 0 else out


def _contiguous_gradient(args: tuple[Any, ...], out: Any) -> Any:
    """Makes the gradient of a layer norm's input contiguous; the fake one has the strides of what it is made of.

    Source: aten/src/ATen/native/layer_norm.cpp and cuda/layer_norm_kernel.cu, `LEGACY_CONTIGUOUS_MEMORY_FORMAT`.
    """
    first, *rest = out
    if first is None or first.is_contiguous():
        return out
    return (torch.empty_like(first, memory_format=torch.contiguous_format), *rest)


_RULES: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    _aten.mse_loss.default: _shrunk,
    _aten.smooth_l1_loss.default: _shrunk,
    _aten.native_layer_norm_backward.default: _contiguous_gradient,
    recurrent.LAYER: recurrent.with_workspace,
}


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a grouped product in float32: kernels fall back to a loop, the fake version takes 16-bit types only.

    Source: torch/_meta_registrations.py, `_meta_grouped_mm_common`.
    """
    halves = [torch.empty_like(matrix, dtype=torch.bfloat16) for matrix in args[:2]]
    out = func(*halves, *args[2:], **kwargs)
    return torch.empty(out.shape, dtype=args[0].dtype, device=out.device)
