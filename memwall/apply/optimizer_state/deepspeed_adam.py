"""DeepSpeed's kernel for Adam and AdamW on the CPU, on torch's own optimizers and their own state.

Its operator is a library of its own (`cpu_adam`, built when DeepSpeed is installed with it or first used), and is
loaded from where either leaves it: nothing is compiled here, and the package is not imported. What is called is what
`deepspeed.ops.adam.DeepSpeedCPUAdam.step` calls (DeepSpeed 0.19.8).
"""

import importlib.util
import itertools
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeepSpeedAdam", "load_operator"]

_NAME = "cpu_adam"
# Far from those of DeepSpeed's own optimizers, which count from 0 in the same library.
_IDS = itertools.count(1 << 30)


@cache
def load_operator() -> Any | None:
    """Returns DeepSpeed's operator; None where it is not installed, not built, or does not load."""
    try:
        package = importlib.util.find_spec("deepspeed")
    except ValueError:  # somebody put a module of that name there that was not imported
        return None
    if package is None or package.origin is None:
        return None
    built = sorted((Path(package.origin).parent / "ops" / "adam").glob(f"{_NAME}_op*.so"))
    for name, path in ((f"{_NAME}_op", built[0] if built else None), (_NAME, _compiled_when_used(_NAME))):
        if path is None or not path.is_file():
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError:  # of another version of torch or Python
            continue
        if _takes_a_step(module):
            return module
    return None


def _takes_a_step(operator: Any) -> bool:
    """Returns whether it is called as here: other versions of DeepSpeed may leave another one behind."""
    parameter = torch.zeros(8, device="cpu")
    parameter.grad = torch.ones(8, device="cpu")
    try:
        DeepSpeedAdam(operator).step(torch.optim.AdamW([parameter]))
    except (AttributeError, TypeError):
        return False
    return bool((parameter != 0).all())


def _compiled_when_used(name: str) -> Path:
    """Returns where an operator of that name is once it was used, as `torch.utils.cpp_extension.load` builds it."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        hip, cuda = torch.version.hip, torch.version.cuda
        built_for = f"rocm{hip.replace('.', '')}" if hip else f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        root = os.path.join(get_default_build_root(), f"{version}_{built_for}")
    return Path(root) / name / f"{name}.so"


class DeepSpeedAdam:
    """Steps torch's Adam and AdamW in float32, dense and on the CPU, until it is garbage."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._ids: dict[bool, int] = {}

    def __del__(self) -> None:
        for number in self._ids.values():
            self._operator.destroy_adam(number)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Steps every parameter that has a gradient, which is changed where a scaler or `maximize` is at work."""
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and float(found_inf) == 1.0:
            return
        for group in optimizer.param_groups:
            number = self._number(is_decoupled=_is_decoupled(optimizer, group))
            lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
            beta1, beta2 = map(float, group["betas"])
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if scale is not None:
                    gradient.div_(scale)
                if group["maximize"]:
                    gradient.neg_()
                state = optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["step"] += 1
                tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
                self._operator.adam_update(
                    number, int(state["step"]), lr, beta1, beta2, eps, decay, True, *map(_in_a_row, tensors)
                )

    def _number(self, *, is_decoupled: bool) -> int:
        if is_decoupled not in self._ids:
            number = next(_IDS)
            self._operator.create_adam(number, 0.0, 0.9, 0.999, 0.0, 0.0, is_decoupled, False)
            self._ids[is_decoupled] = number
        return self._ids[is_decoupled]


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _in_a_row(tensor: Tensor) -> Tensor:
    """Its elements as they lie: the kernel would make copies of tensors that lie in another order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
