"""How fast this machine's CPU steps an optimizer: what its memory gives to two kernels."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memwall.apply.optimizer_state.deepspeed_adam import DeepSpeedAdam, load_operator
from memwall.apply.optimizer_state.partial_step import below_hooks

__all__ = ["CpuStepSpeeds", "cpu_step_speeds"]

# With its gradient and two moments 128 MiB, more than most caches hold.
_NUM_ELEMENTS = 8 << 20
_NUM_STEPS = 5
# A parameter, its gradient and two moments are read, all but the gradient are written.
_BYTES_PER_ELEMENT = 7 * torch.float32.itemsize
# What DeepSpeed's kernel has to be faster by: less is what two measurements differ by.
_LEAST_GAIN = 1.05


class CpuStepSpeeds(NamedTuple):
    """Says what a step reads and writes with all of torch's threads, to two digits: no more of them repeat."""

    torch_bytes_per_second: float
    """Is that of torch's fused kernel."""
    deepspeed_bytes_per_second: float
    """Is that of DeepSpeed's; 0.0 where it is not built, or is not at least 5 % faster."""


def cpu_step_speeds() -> CpuStepSpeeds:
    """Measures both kernels in turns; of each the fastest of a few steps counts."""
    parameter = torch.zeros(_NUM_ELEMENTS, device="cpu")
    parameter.grad = torch.ones(_NUM_ELEMENTS, device="cpu")
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # Below the hooks, where a run that is watched would take it for an optimizer of its own.
    steps: list[Callable[..., Any]] = [below_hooks(torch.optim.AdamW.step)]
    operator = load_operator()
    if operator is not None:
        steps.append(DeepSpeedAdam(operator).step)
    fastest_seconds = [float("inf")] * len(steps)
    for step in steps:
        step(optimizer)  # makes the moments, and the threads
    for _ in range(_NUM_STEPS):
        for number, step in enumerate(steps):
            begin = time.perf_counter()
            step(optimizer)
            fastest_seconds[number] = min(fastest_seconds[number], time.perf_counter() - begin)
    torch_speed, *others = (float(f"{_NUM_ELEMENTS * _BYTES_PER_ELEMENT / seconds:.1e}") for seconds in fastest_seconds)
    is_faster = len(others) == 1 and fastest_seconds[1] * _LEAST_GAIN <= fastest_seconds[0]
    return CpuStepSpeeds(torch_speed, others[0] if is_faster else 0.0)
