"""Stands in for Mamba's selective scan where tensors are fake: one pass over all tokens in place of a loop.

Without mamba-ssm's kernels transformers goes from token to token, a dozen operations for each in forward and backward:
millions in a model of 64 layers, which take minutes to record. The stand-in allocates, saves and frees what the loop
does, with each token's share of a tensor joined to one; the numbers are none, as fake tensors have none.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memwall.patches import Patches
from memwall.torch_internals.fake import FakeTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAME = "mamba_selective_scan"


@contextmanager
def whole_scans(model: "nn.Module") -> Iterator[None]:
    """Has a model on fake tensors scan all tokens at once, while it is called."""
    module = sys.modules.get(type(model).__module__)
    is_fake = isinstance(next(model.parameters(), None), FakeTensor)
    if not is_fake or not hasattr(module, _NAME):
        yield
        return
    with Patches("scans all tokens at once") as patches:
        patches.wrap(module, _NAME, lambda original, *args, **options: _scan(*args, **options))
        yield


def _scan(
    hidden_states: "Tensor",
    dt: "Tensor",
    A: "Tensor",
    B: "Tensor",
    C: "Tensor",
    D: "Tensor | None" = None,
    z: "Tensor | None" = None,
    delta_bias: "Tensor | None" = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Returns a tensor in the shape of the scan's result [batch, width, tokens], and the last state where asked."""
    from torch.nn import functional

    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    decay = (A[None, :, None, :] * dt[..., None]).exp()
    added = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    states, found = _loop().apply(decay, added, C.transpose(1, 2), hidden_states.dtype)
    if D is not None:
        found = found + hidden_states * D[None, :, None]
    if z is not None:
        found = found * functional.silu(z)
    return (found, states[:, :, -1]) if return_last_state else found


def _loop() -> Any:
    """Returns the loop as one function, whose class needs torch, which a command imports late."""
    import torch

    class Loop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, decay: "Tensor", added: "Tensor", C: "Tensor", dtype: Any) -> "tuple[Tensor, Tensor]":
            states = decay.mul(added)  # that of each token, by a product and a sum
            states.add_(added)
            read = states if states.dtype == dtype else states.to(dtype)
            tokens = [states.new_empty(decay.shape[:-1], dtype=dtype)]  # before they are stacked
            found = tokens[0].clone()
            ctx.save_for_backward(decay, states, read, C)
            ctx.mark_non_differentiable(states)
            return states, found

        @staticmethod
        def backward(ctx: Any, _: "Tensor", gradient: "Tensor") -> Any:
            decay, states, _read, C = ctx.saved_tensors
            of_added, of_decay = torch.zeros_like(states), torch.zeros_like(decay)
            return of_decay, of_added, torch.zeros_like(C), None

    return Loop
