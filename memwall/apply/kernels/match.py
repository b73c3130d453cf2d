"""Which fused kernel a module's forward is, found by structure and proven on a small input.

An RMSNorm has a weight over one dimension and an epsilon; a gated MLP has gate, up and down layers with an activation
between. Names only propose: a candidate must give the module's own results and gradients, in its dtype and on its
device, or the module is left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.torch_internals.fake import unset_fake_temporarily
from memwall.triton_kernels import geglu, rms_norm, swiglu

_ROWS = 6
# Root mean square of the difference over that of the module's own result: what rounding at other points may cost.
MAX_DIFFERENCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# Gate, up and down layers, and what may stand before the last; as models call them.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_PACKED = (("gate_up_proj", "down_proj"),)
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "swiglu": (F.silu, ""),
    "geglu": (F.gelu, "none"),
    "geglu (tanh)": (partial(F.gelu, approximate="tanh"), "tanh"),
}


class KernelMatch(NamedTuple):
    """Holds a forward that may stand in for a module's own."""

    kernel: str
    forward: Callable[..., Tensor]
    """To be called with the module's input."""
    num_features: int
    """Counts the features of the input."""
    checked: tuple[str, ...]
    """Parameters whose gradients are compared, besides the input's."""


def candidates(module: nn.Module) -> Iterator[KernelMatch]:
    """Yields forwards that may be the module's, most likely first; none for one that looks like nothing known."""
    if not list(module.children()):
        yield from _rms_norms(module)
    else:
        yield from _gated(module)


def _rms_norms(module: nn.Module) -> Iterator[KernelMatch]:
    parameters = dict(module.named_parameters(recurse=False))
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if isinstance(module, nn.RMSNorm):
        epsilon = "eps"  # None where nobody gave one
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or epsilon is None:
        return
    num_features = parameters["weight"].numel()
    # In fp32 the first and the last are the same.
    for casting in ("plain",) if isinstance(module, nn.RMSNorm) else ("llama", "gemma", "plain"):
        yield KernelMatch(
            f"rms_norm ({casting})", partial(_rms_norm, module, epsilon, casting), num_features, ("weight",)
        )


def _gated(module: nn.Module) -> Iterator[KernelMatch]:
    names = next((names for names in (*_GATED, *_PACKED) if all(_child(module, name) for name in names)), None)
    if names is None:
        return
    activation = _activation(module)
    num_features = getattr(_child(module, names[0]), "in_features", None)
    if activation is None or not isinstance(num_features, int):
        return
    others = [child for name, child in module.named_children() if name not in names]
    dropout = next((name for name, child in module.named_children() if isinstance(child, nn.Dropout)), "")
    if len(others) > 1 + bool(dropout):
        return
    forward = partial(_gated_mlp, module, names, activation, dropout)
    yield KernelMatch(activation.partition(" ")[0], forward, num_features, ())


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def _activation(module: nn.Module) -> str | None:
    """Returns which activation stands in the module, told by its values."""
    # Also of a model without values: an activation has no parameters.
    with torch.no_grad(), unset_fake_temporarily():
        x = torch.linspace(-4.0, 4.0, 65, dtype=torch.float32)
        for child in module.children():
            if list(nn.Module.parameters(child)) or isinstance(child, nn.Dropout):
                continue
            try:
                found = child(x)
            except Exception:
                continue
            for name, (function, _) in _ACTIVATIONS.items():
                if isinstance(found, Tensor) and found.shape == x.shape and (found - function(x)).abs().max() < 2e-6:
                    return name
    return None


def _rms_norm(module: nn.Module, epsilon: str, casting: Any, x: Tensor) -> Tensor:
    weight: Any = module.weight
    eps = getattr(module, epsilon)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    out: Tensor = rms_norm(x, weight, eps=eps, casting=casting)
    return out


def _gated_mlp(module: nn.Module, names: Sequence[str], activation: str, dropout: str, x: Tensor) -> Tensor:
    *first, down = (getattr(module, name) for name in names)
    branches = [layer(x) for layer in first]
    approximate: Any = _ACTIVATIONS[activation][1]
    product = geglu(*branches, approximate=approximate) if approximate else swiglu(*branches)
    if dropout:
        product = getattr(module, dropout)(product)
    result: Tensor = down(product)
    return result


def obstacle(module: nn.Module) -> str | None:
    """Returns why a module's forward is not to be touched; None where it may be."""
    if "forward" in module.__dict__:
        return "its forward was replaced already"
    source = type(module).__module__.partition(".")[0]
    if source in ("liger_kernel", "unsloth", "apex", "transformer_engine"):
        return f"it is a kernel of {source}"
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.numel() == 0:
            return f"its parameter {name} is sharded or of a kind of its own ({type(parameter).__name__})"
        if parameter.is_meta:
            return f"its parameter {name} has no values to check against"
    return None


def disagreement(module: nn.Module, candidate: KernelMatch) -> str | None:
    """Returns how a candidate differs from the module's own forward on a small input; None where it does not."""
    parameters = [parameter for parameter in nn.Module.parameters(module) if parameter.is_floating_point()]
    if not parameters:
        return "it has no parameter that would tell its dtype"
    dtype, device = parameters[0].dtype, parameters[0].device
    if dtype not in MAX_DIFFERENCE:
        return f"its dtype is {dtype}"
    generator = torch.Generator().manual_seed(0)
    # A mean that is not zero: without it, the wider a row is the less it shows whether a norm subtracts it.
    x = torch.randn(_ROWS, candidate.num_features, generator=generator, dtype=torch.float32, device="cpu") + 1.0
    x = x.to(device, dtype)
    modes = [(child, child.training) for child in module.modules()]
    try:
        # Where a dropout stands shows in training only.
        for is_training in (True, False):
            for child, _ in modes:
                child.training = is_training
            reason = _difference(module, candidate, x)
            if reason is not None:
                return reason
    finally:
        for child, was_training in modes:
            child.training = was_training
    return None


def _difference(module: nn.Module, candidate: KernelMatch, x: Tensor) -> str | None:
    devices = [x.device] if x.device.type == "cuda" else []
    outcomes = []
    for forward in (module.forward, candidate.forward):
        # The same masks for both, where there is a dropout.
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(0)
            try:
                outcomes.append(_outcome(forward, module, candidate.checked, x))
            except Exception as error:
                return f"a small input raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not any(gradient.any() for gradient in outcomes[0][1:]):
        return "its gradients are zero on a small input, which tells nothing of its forward"
    for number, (own, ours) in enumerate(zip(*outcomes, strict=True)):
        what = "result" if number == 0 else "gradient"
        if own.shape != ours.shape or own.dtype != ours.dtype:
            return f"its {what} is {own.dtype} {list(own.shape)}, the kernel's {ours.dtype} {list(ours.shape)}"
        difference = relative_difference(own, ours)
        if not difference <= MAX_DIFFERENCE[x.dtype]:
            return f"its {what} differs by {difference:.1e} of its size"
    return None


def relative_difference(own: Tensor, ours: Tensor) -> float:
    """Returns the root mean square of the difference over that of `own`; 0 where both are zero."""
    own, ours = own.detach().double(), ours.detach().double()
    size = own.square().mean().sqrt()
    difference = (own - ours).square().mean().sqrt()
    return float(difference / size) if difference else 0.0


def _outcome(forward: Callable[[Tensor], Any], module: nn.Module, checked: tuple[str, ...], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    wanted = [x, *(p for name in checked if (p := module.get_parameter(name)).requires_grad)]
    result = forward(x)
    if not isinstance(result, Tensor):
        raise TypeError(f"it returns {type(result).__name__}, not a tensor")
    # Gradients that hardly differ along a row would leave little of a LayerNorm's but rounding.
    upstream = torch.randn(
        result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu"
    ).to(result)
    return [result.detach(), *torch.autograd.grad(result, wanted, upstream)]
