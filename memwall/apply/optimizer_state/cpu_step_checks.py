"""Whether an optimizer of a device's parameters can be stepped on the CPU: found out before anything is moved."""

import torch
from torch import Tensor

from memwall.apply.optimizer_state.shares import expected_state_bytes
from memwall.errors import ApplyError, StoreError
from memwall.predict.cpu_step_pipeline import STEPPED_DTYPES, staged_bytes
from memwall.store.buckets import is_dense
from memwall.trace.optimizers import WITH_MOMENTS, has_moments
from memwall.units import format_bytes

_CPU = torch.device("cpu")
_DTYPES = frozenset(getattr(torch, name) for name in STEPPED_DTYPES)
_WITHOUT = "plan without --allow cpu-optimizer-step"
# Counters of steps are smaller, and are not counted.
_MIN_BYTES = 16


def check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Returns if the CPU can step it, as its groups, parameters and gradients are now.

    Args:
        device: where parameters and gradients are to be.

    Raises:
        ApplyError: it cannot, or is not known to.
    """
    found = _obstacle(optimizer, device)
    if found is not None:
        raise ApplyError(f"the plan steps the {type(optimizer).__name__} on the CPU, and {found}; {_WITHOUT}")


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Returns if state is where it was put, and of the kind that the kernel steps.

    Raises:
        ApplyError: somebody has moved it, or converted it.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            found = f"on {value.device}" if value.device != _CPU else ""
            if value.ndim > 0 and value.dtype != parameter.dtype:
                found = f"in {value.dtype}, not in its parameter's {parameter.dtype}"
            if found:
                raise ApplyError(
                    f"the plan steps the {type(optimizer).__name__} on the CPU, and its '{key}' is {found}; leave its "
                    f"state as it is, or {_WITHOUT}"
                )


def check_room(optimizer: torch.optim.Optimizer, device: torch.device, *, bucket_bytes: int, limit_bytes: int) -> None:
    """Returns if host memory has room for a device's state, that which there will be included, and what passes through.

    Raises:
        StoreError: it has none.
    """
    members = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    state_bytes = sum(
        expected_state_bytes(optimizer, parameter, group, _MIN_BYTES, device)
        for parameter, group in members
        if parameter.requires_grad or parameter in optimizer.state
    )
    passing_bytes = staged_bytes([parameter.nbytes for parameter, _ in members], bucket_bytes)
    if state_bytes + passing_bytes > limit_bytes:
        raise StoreError(
            f"the plan steps the {type(optimizer).__name__} on the CPU, for which host memory needs room for "
            f"{format_bytes(state_bytes)} of state and {format_bytes(passing_bytes)} that pass through, and "
            f"{format_bytes(limit_bytes)} can be had; free host memory, or {_WITHOUT}"
        )


def _obstacle(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    if not has_moments(optimizer):
        return f"only {' and '.join(WITH_MOMENTS)} are stepped there"
    for group in optimizer.param_groups:
        if group.get("capturable"):
            return "a capturable one counts its steps on the device"
        if isinstance(group["lr"], Tensor) and group["lr"].device != _CPU:
            return f"its learning rate is on {group['lr'].device}"
        for parameter in group["params"]:
            for name, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
                if tensor is not None and tensor.device != device:
                    return f"a {name} is on {tensor.device}, not on {device}"
            if parameter.dtype not in _DTYPES:
                return f"a parameter is in {parameter.dtype}, not in {' or '.join(STEPPED_DTYPES)}"
            if not is_dense(parameter):
                return "a parameter lies in memory with gaps"
            if parameter.grad is not None and parameter.grad.is_sparse:
                return "a gradient is sparse"
    return None
