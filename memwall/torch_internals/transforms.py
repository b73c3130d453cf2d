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
_PLAIN = frozenset(
    f"{name}Backward{number}"
    for name, numbers in {
        **dict.fromkeys(("Addmm", "Mm", "Bmm", "Baddbmm", "T", "Transpose", "Permute", "View", "UnsafeView"), "0"),
        **dict.fromkeys(("ReshapeAlias", "Expand", "Unsqueeze", "Clone", "Neg", "Cat", "Slice", "ToCopy"), "0"),
        **dict.fromkeys(("Relu", "Gelu", "Tanh", "Sigmoid", "Exp", "Log", "LogSoftmax", "Softmax"), "0"),
        **dict.fromkeys(("NllLoss", "MseLoss", "NativeLayerNorm", "Convolution", "Embedding"), "0"),
        **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Mean", "Sum", "Squeeze", "Select"), "01"),
    }.items()
    for number in numbers
)
"""Steps of a backward that torch takes by one formula, recorded or not; group norms, SiLU and dropout have two."""


def without_needless_graphs() -> Callable[[], None] | None:
    """Has no backward of `torch.func.grad` recorded that nobody can differentiate; returns what ends that.

    That function has each recorded, for a transform or a backward around it (`create_graph=True` in
    torch/_functorch/eager_transforms.py, 2.13): what was saved, and what backward makes, is all there until it ends.
    Where one of its steps has a formula of its own for that, it is recorded: the other one rounds differently.

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
            needless = all(_is_needless(tensor) for tensor in (*outputs, *inputs)) and _is_plain(outputs)
            create_graph = not needless
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


def _is_plain(outputs: Sequence[Tensor]) -> bool:
    """Tells whether a backward comes to the same bits whether or not it is recorded, by its steps' names."""
    seen = set[Any]()
    left = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() not in _PLAIN and node.next_functions:  # what ends a branch only keeps a gradient
            return False
        left += [following for following, _ in node.next_functions if following is not None]
    return True
