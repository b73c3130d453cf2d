"""Optimizer state on the next tier between steps; a step goes through it bucket by bucket."""

from memwall.apply.state_technique import PlacementEffect, StateHandler
from memwall.apply.technique import Target, TierName, register
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.units import format_bytes


@register("optimizer-placement")
class OptimizerStateHandler(StateHandler[OptimizerPlacement]):
    """Streams the state through a step on the parameters' device."""

    is_away = takes_several = True

    @property
    def kept(self) -> str:
        return "on disk" if self.action.tier == "disk" else "in host memory"

    def place(self, target: Target) -> None:
        target.keeper.place(target.optimizers, self.action, host_limit_bytes=target.host_limit_bytes or 0)

    def effect(self, target: Target) -> PlacementEffect:
        resident_bytes = self.action.resident_bytes
        return PlacementEffect(
            target,
            name=f"optimizer state on the {self.action.tier}",
            expected=f"between steps no more than {format_bytes(resident_bytes)} of state are in memory",
            tier=self.action.tier,
            min_bytes=self.action.min_bytes,
            resident_bytes=resident_bytes,
        )

    def held_bytes(self, tier: TierName) -> int:
        if self.action.tier == tier:
            return self.action.saved_bytes or 0
        return self.action.staging_bytes if tier == "host" else 0
