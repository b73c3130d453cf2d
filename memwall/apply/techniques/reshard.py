"""Units of FSDP2 free after forward what they have gathered, as a plan says."""

from typing import Any

from torch import nn

from memwall.apply.effect import Effect
from memwall.apply.resharding import with_resharding
from memwall.apply.technique import Handler, Target, register
from memwall.planning.techniques.reshard import Reshard
from memwall.torch_internals.sharding import is_sharded, is_sharding_unit
from memwall.trace.attached import attach_hook


@register("reshard")
class ReshardHandler(Handler[Reshard]):
    """Has units free after forward what they have gathered, and sets them back as the script has them."""

    def apply(self, target: Target) -> None:
        target.on_undo(with_resharding(target.model, dict.fromkeys(self.action.units, True)))

    def effect(self, target: Target) -> "ReshardEffect":
        path = self.action.units[0]
        return ReshardEffect(path, target.model.get_submodule(path))


class ReshardEffect(Effect):
    """Sees that the first of the units has but a rank's part of its own parameters once its forward has ended."""

    expected = "after forward its parameters are a rank's part again"

    def __init__(self, path: str, unit: nn.Module) -> None:
        self.name = f"gathered parameters of {path} freed after forward"
        self._seen: set[bool] = set()
        self._hook = attach_hook(unit.register_forward_hook, self._look)

    def _look(self, unit: nn.Module, *_: Any) -> None:
        within = [module for module in unit.modules() if module is not unit and is_sharding_unit(module)]
        others = {id(parameter) for module in within for parameter in module.parameters()}
        own = [parameter for parameter in unit.parameters() if id(parameter) not in others]
        self._seen.add(all(map(is_sharded, own)))

    def is_seen(self) -> bool:
        return True in self._seen

    def contrary(self) -> str:
        return "they stay whole" if self._seen == {False} else ""

    def close(self) -> None:
        self._hook.undo()
