"""Keeps the factors of what a head would have computed, and sees whether they are still the same."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.errors import ApplyError
from memwall.torch_internals.autograd import version_of


class LossCounts:
    """Counts how often a head's logits were spared, and notes who asked for them all the same."""

    def __init__(self) -> None:
        self.num_losses = 0
        """Losses computed without logits."""
        self.asked_by = ""
        """The function that last needed the logits themselves."""


class Product(NamedTuple):
    """Holds what a head would have computed."""

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
    scale: float = 1.0
    """Multiplies the logits, before the bound."""
    softcap: float | None = None
    """Bound c of the logits: c tanh(logits / c)."""

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the hidden states, weight and bias in one dtype."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias

    def logits(self) -> Tensor:
        """Returns the logits, as scaled and bounded since."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = F.linear(*self.factors())
            if self.softcap is not None:
                return self.softcap * torch.tanh(logits * (self.scale / self.softcap))
            return logits if self.scale == 1.0 else logits * self.scale


def versions_of(product: Product) -> tuple[int, ...]:
    """Returns how often each factor was written in place."""
    factors = (product.hidden, product.weight, product.bias)
    return tuple(-1 if tensor is None or tensor.is_inference() else version_of(tensor) for tensor in factors)


def check_unchanged(product: Product, versions: tuple[int, ...]) -> None:
    """Checks that the logits can still be what they were.

    Raises:
        ApplyError: a factor was written in place, as the weight is by an optimizer's step.
    """
    if product.weight.untyped_storage().nbytes() < max(product.weight.nbytes, 1):
        raise ApplyError(
            "the weight of the head went away before its loss was computed, as where FSDP or ZeRO-3 frees it after its "
            "forward; "
            "shard the model before kernels are put into it, or leave out --allow kernels"
        )
    for name, before, now in zip(("hidden states", "weight", "bias"), versions, versions_of(product), strict=True):
        if before != now:
            raise ApplyError(
                f"logits are computed when they are asked for, and the {name} of the head changed since its forward; "
                "use logits before optimizer.step(), or do without kernels: leave out --allow kernels"
            )


class DeferredGradient(torch.autograd.Function):
    """Hands a gradient for logits that were used as a whole on to the factors, as the head would."""

    @staticmethod
    def forward(ctx: Any, make: Any, product: Product, dtype: torch.dtype, *factors: Tensor | None) -> Tensor:
        ctx.product, ctx.dtype, ctx.versions = product, dtype, versions_of(product)
        made: Tensor = make()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        product: Product = ctx.product
        check_unchanged(product, ctx.versions)
        factors = (product.hidden, product.weight, product.bias)
        wanted = ctx.needs_input_grad[3:]
        leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(factors, wanted, strict=True)]
        with torch.enable_grad():
            hidden, weight, bias = leaves
            assert hidden is not None
            assert weight is not None
            logits = product._replace(hidden=hidden, weight=weight, bias=bias).logits().to(ctx.dtype)
        asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, asked, grads[0]))
        return None, None, None, *(next(found) if w else None for w in wanted)
