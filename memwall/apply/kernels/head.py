"""The head of a language model whose loss is computed without its logits: found, replaced, checked.

In training the head returns `DeferredLogits`; in evaluation, under torch.compile and where no gradient is wanted it
computes what it always did. The loss may be of logits that were scaled or bounded by tanh; whoever needs them for
something else gets them.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.apply.kernels.deferred_logits import DeferredLogits
from memwall.apply.kernels.deferred_product import LossCounts, Product
from memwall.apply.kernels.match import MAX_DIFFERENCE, KernelMatch, relative_difference
from memwall.triton_kernels.linear_cross_entropy import chunk_rows_for, linear_cross_entropy

HEAD_KERNEL = "linear_cross_entropy"
_ROWS = 6


def head_of(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Returns the path and layer that turn hidden states into logits; None where the model does not say."""
    asked = getattr(model, "get_output_embeddings", None)
    found = asked() if callable(asked) else getattr(model, "lm_head", None)
    if type(found) is not nn.Linear:
        return None
    return next(((path, module) for path, module in model.named_modules() if module is found), None)


def chunk_rows_of(model: nn.Module) -> int:
    """Returns how many rows of logits take no more room than the head's gradient; 0 for a model without one.

    That gradient exists at the same moment in any case, so fewer rows would save little and read the head more often.
    """
    head = head_of(model)
    if head is None:
        return 0
    weight = head[1].weight
    rows: int = chunk_rows_for(weight.numel() * weight.element_size(), weight.shape[0], weight.dtype)
    return rows


def head_candidate(module: nn.Linear, chunk_rows: int, counts: LossCounts) -> KernelMatch:
    """Returns the forward that defers a head's logits."""
    return KernelMatch(HEAD_KERNEL, partial(_deferred, module, chunk_rows, counts), module.in_features, ())


def _deferred(module: nn.Linear, chunk_rows: int, counts: LossCounts, hidden: Tensor) -> Tensor:
    if not (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return F.linear(hidden, module.weight, module.bias)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return DeferredLogits.of(Product(hidden, module.weight, module.bias, dtype, chunk_rows, counts))


def head_disagreement(module: nn.Linear) -> str | None:
    """Returns how the loss without logits, or what it sends back, differs on a small input; None where it does not.

    The head's own gradient would take as much room as the head, and is left to the tests of the operation.
    """
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if weight.dtype not in MAX_DIFFERENCE:
        return f"its dtype is {weight.dtype}"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, module.in_features, generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(weight).requires_grad_()
    target = torch.randint(module.out_features, (_ROWS,), generator=generator, device="cpu").to(weight.device)
    with torch.enable_grad():
        own = F.cross_entropy(F.linear(x, weight, bias).float(), target)
        ours = linear_cross_entropy(x, weight, target, bias=bias, chunk_rows=_ROWS // 2)
        pairs = ((own, ours), (torch.autograd.grad(own, x)[0], torch.autograd.grad(ours, x)[0]))
    for what, (expected, found) in zip(("loss", "gradient"), pairs, strict=True):
        difference = relative_difference(expected, found)
        if not difference <= MAX_DIFFERENCE[weight.dtype]:
            return f"its {what} differs by {difference:.1e} of its size"
    return None
