"""How fast this machine's CPU steps an optimizer: what its memory gives to torch's fused kernel."""

import time

import torch

from memwall.apply.optimizer_state.partial_step import below_hooks

# With its gradient and two moments 128 MiB, more than most caches hold.
_NUM_ELEMENTS = 8 << 20
_NUM_STEPS = 5
# A parameter, its gradient and two moments are read, all but the gradient are written.
_BYTES_PER_ELEMENT = 7 * torch.float32.itemsize


def cpu_step_bytes_per_second() -> float:
    """Measures what a step reads and writes with all of torch's threads; the fastest of a few steps counts.

    The figure has two digits: no more of them repeat.
    """
    parameter = torch.zeros(_NUM_ELEMENTS, device="cpu")
    parameter.grad = torch.ones(_NUM_ELEMENTS, device="cpu")
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # Below the hooks, where a run that is watched would take it for an optimizer of its own.
    step = below_hooks(torch.optim.AdamW.step)
    step(optimizer)  # makes the moments, and the threads
    fastest_seconds = float("inf")
    for _ in range(_NUM_STEPS):
        begin = time.perf_counter()
        step(optimizer)
        fastest_seconds = min(fastest_seconds, time.perf_counter() - begin)
    return float(f"{_NUM_ELEMENTS * _BYTES_PER_ELEMENT / fastest_seconds:.1e}")
