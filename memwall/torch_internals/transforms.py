"""Transforms of torch.func: what a gradient of theirs keeps while it is computed."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.patches import Patches
from memwall.torch_internals.names import find

_WHY = "has gradients of torch.func let go of what they have read"
_MODULE = "torch._functorch.eager_transforms"
_gradients = find(f"{_MODULE}._autograd_grad", _WHY)
_enters = find(f"{_MODULE}._grad_increment_nesting", _WHY)
_nodes = find("torch.autograd.function._HookMixin", _WHY)
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
        **dict.fromkeys(("NllLoss", "MseLoss", "NativeLayerNorm", "Convolution", "Embedding", "Select"), "0"),
        **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Mean", "Sum", "Squeeze"), "01"),
    }.items()
    for number in numbers
)
"""Steps of a backward that torch takes by one formula, recorded or not; group norms, SiLU and dropout have two."""


def without_needless_graphs(patches: Patches) -> None:
    """Has no backward of `torch.func.grad` recorded on a CPU that nobody can differentiate, until patches are undone.

    That function has each recorded, for a transform or a backward around it (`create_graph=True` in
    torch/_functorch/eager_transforms.py, 2.13): what was saved, and what backward makes, is all there until it ends.
    Where one of its steps has a formula of its own for that, it is recorded: the other one rounds differently. So it
    is where its function has registered a hook of a tensor, or may have, since it began before this was called: what
    such a hook brings in may be trained outside, and no graph tells of its hooks.

    Nothing changes where this torch does not tell what is around a transform.
    """
    if any(name is None for name in (_gradients, _enters, _nodes, _levels, _kinds, _level_of, _within)):
        return
    is_hooked = dict[tuple[int, int], bool]()  # of each thread, and each level of a gradient that it computes

    def enter(original: Callable[[], int]) -> int:
        level = original()
        is_hooked[threading.get_ident(), level] = False
        return level

    def register(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = [(threading.get_ident(), level.level()) for level in _levels() or ()]
        is_hooked.update(dict.fromkeys(own or is_hooked, True))  # a thread without any may have been given a tensor
        return original(*args, **kwargs)

    def run(
        original: Callable[..., Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
        create_graph: bool = True,
    ) -> Any:
        if create_graph and not torch.compiler.is_compiling():
            here = threading.get_ident(), max((level.level() for level in _levels() or ()), default=0)
            is_needless = not is_hooked.get(here, True) and all(map(_is_needless, (*outputs, *inputs)))
            create_graph = not (is_needless and _is_plain(outputs))
        return original(outputs, inputs, grad_outputs, retain_graph, create_graph)

    patches.wrap(sys.modules[_MODULE], "_grad_increment_nesting", enter)
    patches.wrap(sys.modules[_MODULE], "_autograd_grad", run)
    patches.wrap(Tensor, "register_hook", register)
    patches.wrap(_nodes, "_register_hook", register)


def _is_needless(tensor: Tensor) -> bool:
    """Tells whether only the innermost transform tracks a tensor of a CPU: what is around it is `vmap`."""
    *around, innermost = _levels() or (None,)
    if innermost is None or innermost.key() != _kinds.Grad or _level_of(tensor) != innermost.level():
        return False
    if tensor.device.type != "cpu" or any(level.key() != _kinds.Vmap for level in around):
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
