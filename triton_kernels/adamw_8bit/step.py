"""`adamw_8bit_`: one parameter's step of AdamW with both moments in 8 bits, in place, in one launch.

It is here to be raced against torchao's on a GPU; no plan uses it yet. Label: *changes numerics*.
"""

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._launch import half_for
from .._rows import DTYPES
from ._terms import BLOCK_ELEMENTS, Moments, Scalars

__all__ = ["Moments", "adamw_8bit_", "new_moments"]


def new_moments(param: Tensor) -> Moments:
    """Returns the moments of a parameter that was never stepped."""
    num_blocks = -(-param.numel() // BLOCK_ELEMENTS)
    codes = (torch.zeros(param.numel(), dtype=dtype, device=param.device) for dtype in (torch.int8, torch.uint8))
    units = (torch.zeros(num_blocks, dtype=torch.float32, device=param.device) for _ in range(2))
    return Moments(*codes, *units)


@torch.no_grad()
def adamw_8bit_(
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Steps a parameter as `torch.optim.AdamW` does (arXiv 1711.05101), up to what moments of 8 bits lose.

    Args:
        param: contiguous, of 16 or 32 bits.
        grad: its gradient, contiguous too.
        moments: from `new_moments`; the step writes them.
        step: the number of this step, from 1 on.
        lr: learning rate. betas: decay of the moments. eps: added to the second moment's root.
        weight_decay: decoupled from the gradient.

    Raises:
        UsageError: a tensor is sparse, has gaps, or is of another dtype.
    """
    wanted = set(DTYPES) - {torch.float64}
    for tensor in (param, grad):
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.dtype not in wanted:
            raise UsageError(
                f"adamw_8bit_ wants contiguous tensors of 16 or 32 bits, found {tensor.dtype} {list(tensor.shape)}; "
                "take torch.optim.AdamW"
            )
    scalars = Scalars(
        decay=1.0 - lr * weight_decay,
        first_share=1.0 - betas[0],
        second_decay=betas[1],
        second_share=1.0 - betas[1],
        step_size=lr / (1.0 - betas[0] ** step),
        root_factor=(1.0 - betas[1] ** step) ** -0.5,
        eps=eps,
    )
    _step_op(param.view(-1), grad.view(-1), *moments, list(scalars))


@torch.library.custom_op("memwall::adamw_8bit", mutates_args=("param", "first", "root", "first_units", "root_units"))
def _step_op(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    root: Tensor,
    first_units: Tensor,
    root_units: Tensor,
    scalars: list[float],
) -> None:
    """Is an operator, so that fake tensors can run it and version counters count."""
    moments = Moments(first, root, first_units, root_units)
    if param.numel() > 0:
        half_for(param, __package__, "adamw_8bit")(param, grad, moments, Scalars(*scalars))


@_step_op.register_fake
def _(*arguments: object) -> None:
    return None
