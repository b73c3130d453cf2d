"""What may be written over: only what the caller has given away, and what is his to give."""

import torch
from torch import Tensor

from memwall.errors import UsageError
from memwall.torch_internals.autograd import base_of

__all__ = ["check_given_away"]


def check_given_away(option: str, tensor: Tensor) -> None:
    """Refuses a leaf that requires a gradient, and elements that share memory.

    Whoever else has saved the tensor for backward is told by autograd, from the version counter.

    Args:
        option: what the caller gave it away with, for the message.
        tensor: what is to be written over.

    Raises:
        UsageError: it is not to be written over.
    """
    base = base_of(tensor)
    source = tensor if base is None else base
    if source.is_leaf and source.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{option} would write over a leaf that requires a gradient, a parameter for instance; it is for what a "
            "layer has just computed"
        )
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            raise UsageError(
                f"{option} wants elements that have memory of their own each, found the shape {list(tensor.shape)} "
                f"with strides {list(tensor.stride())}"
            )
        reach = max(reach, size * stride)
