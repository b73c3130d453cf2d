"""The optimizer's step on the CPU, beside state in host memory: parameters and gradients pass by instead of state."""

import time
from collections.abc import Sequence

import msgspec
import torch

from memwall.apply.optimizer_state.open_state import why_not_on_cpu
from memwall.apply.optimizer_state.partial_step import below_hooks
from memwall.apply.state_technique import PlacementEffect, StateHandler
from memwall.apply.technique import Target, TierName, register
from memwall.machine.tiers import Machine
from memwall.planning.techniques.cpu_step import StepOnCpu

# With its gradient and two moments 128 MiB, more than most caches hold.
_NUM_ELEMENTS = 8 << 20
_NUM_STEPS = 5
# A parameter, its gradient and two moments are read, all but the gradient are written.
_NUM_PASSES = 7
_RATES = {"cpu_step_bytes_per_second": torch.float32, "cpu_step_bfloat16_bytes_per_second": torch.bfloat16}
"""Names what a machine has measured, and the dtype of parameters, gradients and state meanwhile."""


@register("cpu-step")
class CpuStepHandler(StateHandler[StepOnCpu]):
    """Has the CPU step a device's parameters."""

    is_away = True

    @classmethod
    def measured(cls, machine: Machine) -> Machine:
        if not machine.tiers:  # there is nowhere to have the state
            return machine
        return msgspec.structs.replace(machine, **{name: _bytes_per_second(dtype) for name, dtype in _RATES.items()})

    @classmethod
    def why_not_here(cls, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        return why_not_on_cpu(optimizers)

    @property
    def kept(self) -> str:
        return "in host memory"

    def place(self, target: Target) -> None:
        target.keeper.step_on_cpu(
            target.optimizers[0],
            bucket_bytes=self.action.bucket_bytes,
            host_limit_bytes=target.host_limit_bytes or 0,
        )

    def effect(self, target: Target) -> PlacementEffect:
        return PlacementEffect(
            target,
            name="the optimizer's step on the CPU",
            expected="its state is in host memory, where the CPU steps it",
            tier="host",
            min_bytes=self.action.min_bytes,
            resident_bytes=0,
        )

    def held_bytes(self, tier: TierName) -> int:
        return (self.action.saved_bytes or 0) if tier == "host" else 0


def _bytes_per_second(dtype: torch.dtype) -> float:
    """Measures what a step of torch's fused kernel reads and writes with all threads: the fastest of a few steps.

    The figure has two digits: no more of them repeat.
    """
    parameter = torch.zeros(_NUM_ELEMENTS, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # Below the hooks, where a run that is watched would take it for an optimizer of its own.
    step = below_hooks(torch.optim.AdamW.step)
    step(optimizer)  # makes the moments, and the threads
    fastest_seconds = float("inf")
    for _ in range(_NUM_STEPS):
        begin = time.perf_counter()
        step(optimizer)
        fastest_seconds = min(fastest_seconds, time.perf_counter() - begin)
    return float(f"{_NUM_PASSES * parameter.nbytes / fastest_seconds:.1e}")
