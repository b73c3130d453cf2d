"""The optimizer's step on the CPU, beside state in host memory: parameters and gradients pass by instead of state."""

from collections.abc import Sequence

import msgspec
import torch

from memwall.apply.optimizer_state.cpu_speed import cpu_step_bytes_per_second
from memwall.apply.optimizer_state.state_keeper import why_not_on_cpu
from memwall.apply.state_technique import PlacementEffect, StateHandler
from memwall.apply.technique import Target, TierName, register
from memwall.machine.tiers import Machine
from memwall.planning.techniques.cpu_step import StepOnCpu


@register("cpu-step")
class CpuStepHandler(StateHandler[StepOnCpu]):
    """Has the CPU step a device's parameters."""

    is_away = True

    @classmethod
    def measured(cls, machine: Machine) -> Machine:
        if not machine.tiers:  # there is nowhere to have the state
            return machine
        return msgspec.structs.replace(machine, cpu_step_bytes_per_second=cpu_step_bytes_per_second())

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
