"""Transforms of torch.func: what a gradient of theirs keeps while it is computed."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.patches import Patches
from memwall.torch_internals.names import find

_WHY = "has gradients of torch.func let go of what they have read"
_MODULE = "torch._functorch.eager_transforms"
_gradients = find(f"{_MODULE}._autograd_grad", _WHY)
_levels = find("torch._C._functorch.get_interpreter_stack", _WHY)
_kinds = find("torch._C._functorch.TransformType", _WHY)
_level_of = find("torch._C._functorch.maybe_get_level", _WHY)
_within = find("torch._C._functorch.get_unwrapped", _WHY)


def without_needless_graphs() -> Callable[[], None] | None:
    """Has no backward of `torch.func.grad` recorded that nobody can differentiate; returns what ends that.

    That function has each recorded, for a transform or a backward around it (`create_graph=True` in
    torch/_functorch/eager_transforms.py, 2.13): what was saved, and what backward makes, is all there until it ends.

    Returns:
        None where this torch does not tell what is around a transform.
    """
    if any(name is None for name in (_gradients, _levels, _kinds, _level_of, _within)):
        return None

    def run(
        original: Callable[..., Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
        create_graph: bool = True,
    ) -> Any:
        if create_graph and not torch.compiler.is_compiling():
            create_graph = not all(_is_needless(tensor) for tensor in (*outputs, *inputs))
        return original(outputs, inputs, grad_outputs, retain_graph, create_graph)

    patches = Patches(_WHY)
    patches.wrap(sys.modules[_MODULE], "_autograd_grad", run)
    return patches.undo


def _is_needless(tensor: Tensor) -> bool:
    """Tells whether the innermost transform tracks a tensor and nothing around it does: what is there is `vmap`."""
    *around, innermost = _levels() or (None,)
    if innermost is None or innermost.key() != _kinds.Grad or _level_of(tensor) != innermost.level():
        return False
    if any(level.key() != _kinds.Vmap for level in around):
        return False
    while _level_of(tensor) > 0:
        tensor = _within(tensor)
    return not tensor.requires_grad
