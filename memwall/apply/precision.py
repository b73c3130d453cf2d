"""Lower precision handler: forward under autocast and, for float16, gradients scaled so that they don't vanish.

bfloat16 has float32's range. float16's smallest positive number is 6e-8 (IEEE 754 binary16), which gradients fall
below: the backward pass runs on gradients multiplied by a power of two, each parameter's gradient is divided by it
before it is added to `.grad`, and a step whose gradients overflowed is left out (Micikevicius et al. 2018, section 3.2,
arXiv:1710.03740). A parameter's `.grad` therefore holds the true gradient, so that clipping, accumulation and logging
in an unmodified loop mean what they meant. Hooks that see gradients on their way, and `retain_grad`, see scaled ones.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.errors import ApplyError
from memwall.machine.process_group import num_processes
from memwall.patches import Patches
from memwall.torch_internals.storages import sparse_values
from memwall.trace.attached import attach_hook, wrap_forward

_log = logging.getLogger(__name__)

# As torch.amp.GradScaler begins and goes on by default.
INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
_LEAST_SCALE = 1.0
"""Below it gradients are not finite for another reason."""

Dtype = Literal["bfloat16", "float16"]


def lower_dtype(device_type: str) -> Dtype:
    """Returns bfloat16 where the device computes in it: CPUs, and CUDA devices of compute capability 8.0 on."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


class LowerPrecision:
    """Runs a model's forward under autocast, its results in float32 again; `undo` gives the model back.

    Args:
        is_running: whether a hook before the model's forward asks for it. That call has already looked its forward up,
            so it is put under autocast by itself.

    Attributes:
        scaling: of the gradients, for float16; else None.

    Raises:
        ApplyError: float16, and a trainable parameter is not in float32.
    """

    def __init__(self, model: nn.Module, dtype: Dtype, *, is_running: bool = False) -> None:
        self.scaling = GradientScaling(model) if dtype == "float16" else None
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        self._model, self._device = model, next((p.device.type for p in model.parameters()), "cpu")
        if self.scaling is not None:
            self.scaling.apply()
        self._unwrap = wrap_forward(model, self._run, "the model")
        if is_running:
            self._cast_present_call()

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device, dtype=self._dtype):
            out = original(*args, **kwargs)
        return _in_float32(out)

    def _cast_present_call(self) -> None:
        context = torch.autocast(self._device, dtype=self._dtype)

        def leave(module: nn.Module, args: Any, out: Any) -> Any:
            handle.undo()
            context.__exit__(None, None, None)
            return _in_float32(out)

        context.__enter__()
        handle = attach_hook(self._model.register_forward_hook, leave, always_call=True)

    def undo(self) -> None:
        """Leaves the model's forward and autograd as they were before."""
        self._unwrap()
        if self.scaling is not None:
            self.scaling.undo()


class GradientScaling:
    """Multiplies what `torch.autograd.backward` begins with, divides what reaches a parameter of the model.

    Attributes:
        scale: the present factor, a power of two, so that it changes no bit of a gradient that is in range.
        num_skipped_steps: steps left out because a gradient was infinite or NaN.
    """

    def __init__(self, model: nn.Module) -> None:
        self.scale = INITIAL_SCALE
        self.num_skipped_steps = 0
        self._model = model
        self._steps_at_scale = 0
        self._is_inside = False
        self._scale_inside = self.scale
        """A step inside backward changes the next pass's."""
        self._hooked: dict[int, nn.Parameter] = {}
        """By id; with the parameter, so that no other takes its id."""
        self._largest: dict[int, Tensor] = {}
        """Holds the largest magnitude of a parameter's scaled gradients since its last step: later they are clipped."""
        self._patches = Patches("scales gradients of float16")

    def apply(self) -> None:
        """Has backward passes scaled from now on.

        Raises:
            ApplyError: a trainable parameter is not in float32; its own gradient would vanish.
        """
        self._hook_parameters()

        def backward(
            original: Callable[..., None],
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            **rest: Any,
        ) -> None:
            if self._is_inside:  # reentrant checkpointing: what it was given is scaled already
                original(tensors, grad_tensors, retain_graph, create_graph, **rest)
                return
            roots = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
            given = (grad_tensors,) * len(roots) if not isinstance(grad_tensors, Sequence) else tuple(grad_tensors)
            self._check(roots, create_graph=create_graph)
            self._scale_inside = self.scale
            scaled = tuple(self._first_gradient(root, gradient) for root, gradient in zip(roots, given, strict=True))
            self._is_inside = True
            try:
                original(roots, scaled, retain_graph, create_graph, **rest)
            finally:
                self._is_inside = False

        def grad(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Called by a node of the backward pass, what it returns goes on as a scaled gradient.
            was_inside, self._is_inside = self._is_inside, False
            try:
                return original(*args, **kwargs)
            finally:
                self._is_inside = was_inside

        self._patches.wrap(torch.autograd, "backward", backward)
        self._patches.wrap(torch.autograd, "grad", grad)
        self._patches.hook(register_optimizer_step_pre_hook, self._before_step)

    def undo(self) -> None:
        """Leaves backward passes as they were before."""
        self._hooked, self._largest = {}, {}
        self._patches.undo()

    def is_of(self, model: nn.Module) -> bool:
        """Returns whether it scales the gradients of this model."""
        return self._model is model

    def state_dict(self) -> dict[str, Any]:
        """Returns what a later process goes on with."""
        return {
            "scale": self.scale,
            "num_skipped_steps": self.num_skipped_steps,
            "steps_at_scale": self._steps_at_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another process was."""
        self.scale, self._steps_at_scale = state["scale"], state["steps_at_scale"]
        self.num_skipped_steps = state["num_skipped_steps"]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is in force in this process: a model that is saved whole takes this along."""
        return {**vars(self), "_patches": Patches(""), "_hooked": {}, "_largest": {}}

    def _hook_parameters(self) -> None:
        """Hooks the parameters, and those that a loop unfreezes later."""
        new = [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._hooked
        ]
        for name, parameter in new:
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise ApplyError(
                    f"float16 autocast keeps weights in float32, and '{name}' is in {dtype}; load the model in "
                    "float32, or leave precision alone"
                )
        for _, parameter in new:
            self._patches.hook(parameter.register_hook, partial(self._unscale, id(parameter)))
            self._hooked[id(parameter)] = parameter

    def _unscale(self, key: int, gradient: Tensor) -> Tensor:
        if not self._is_inside:
            return gradient
        values = sparse_values(gradient) if gradient.is_sparse else gradient
        if values.numel():
            largest, before = torch.linalg.vector_norm(values.detach(), float("inf")), self._largest.get(key)
            self._largest[key] = largest if before is None else torch.maximum(before, largest)
        # Not in place: autograd may hand one tensor to several parameters.
        return gradient / self._scale_inside

    def _first_gradient(self, root: Tensor | GradientEdge, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            return gradient * self._scale_inside
        if isinstance(root, Tensor) and root.numel() == 1:
            return torch.full_like(root, self._scale_inside)
        return None  # autograd's own error says that a gradient must be given

    def _check(self, roots: tuple[Tensor | GradientEdge, ...], *, create_graph: bool) -> None:
        if create_graph:
            raise ApplyError(
                "float16 under memwall cannot differentiate twice (backward was called with create_graph=True); "
                "leave precision alone: without --allow precision"
            )
        self._hook_parameters()
        for leaf in leaves(roots):
            if id(leaf) not in self._hooked:
                raise ApplyError(
                    f"float16: backward reaches a tensor of shape {tuple(leaf.shape)} that is no parameter of "
                    f"{type(self._model).__name__}, so its gradient would stay multiplied by {self.scale:g}; detach "
                    "it, or leave precision alone: without --allow precision"
                )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._hooked]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        if parameters and closure is not None:
            raise ApplyError(
                f"float16: {type(optimizer).__name__}.step was given a closure, whose gradients come too late to leave "
                "the step out; call the closure before step(), or leave precision alone: without --allow precision"
            )
        if not parameters or not self._largest:
            return
        # Of all parameters: where several optimizers step, the first of them leaves the step out for the others, too.
        largest, self._largest = list(self._largest.values()), {}
        if _on_all_ranks(torch.isfinite(torch.stack([value.to(largest[0].device) for value in largest]).max())):
            self._steps_at_scale += 1
            if self._steps_at_scale == GROWTH_STEPS:
                self.scale, self._steps_at_scale = self.scale * 2, 0
            return
        self.scale, self._steps_at_scale = max(self.scale / 2, _LEAST_SCALE), 0
        self.num_skipped_steps += 1
        _log.warning(
            "a gradient overflowed in float16: this step changes no weight, and the loss is scaled by %g from now on; "
            "if that happens in most steps, train in bfloat16 or float32",
            self.scale,
        )
        for parameter in self._hooked.values():  # an optimizer passes over parameters without a gradient
            parameter.grad = None


def _on_all_ranks(is_finite: Tensor) -> bool:
    """Returns whether no rank's gradients overflowed: after their reduction every rank has those of all others."""
    if num_processes() > 1:
        is_finite = is_finite.to(torch.int32)
        distributed.all_reduce(is_finite, distributed.ReduceOp.MIN)
    return bool(is_finite)


def leaves(roots: tuple[Tensor | GradientEdge, ...]) -> Iterator[Tensor]:
    """Returns the tensors whose `.grad` a backward pass from `roots` adds to."""
    for node in nodes_of(root.grad_fn if isinstance(root, Tensor) else root.node for root in roots):
        leaf = getattr(node, "variable", None)  # AccumulateGrad's
        if isinstance(leaf, Tensor):
            yield leaf


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of a graph, once each, from those that a backward pass begins at; None stands for none."""
    stack = list(dict.fromkeys(node for node in roots if node is not None))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _in_float32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _in_float32(value[key])
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_in_float32(item) for item in value)
    return [_in_float32(item) for item in value] if isinstance(value, list) else value
