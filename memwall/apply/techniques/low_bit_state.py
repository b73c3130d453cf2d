"""The moments of Adam and AdamW in 8 bits between steps; a step opens them slice by slice."""

import msgspec

from memwall.apply.effect import Effect
from memwall.apply.optimizer_state.low_bit_form import load_torchao
from memwall.apply.state_technique import StateHandler
from memwall.apply.technique import Target, register
from memwall.planning.settings import Settings
from memwall.planning.techniques.low_bit_state import LowBitState


@register("low-bit-state")
class LowBitHandler(StateHandler[LowBitState]):
    """Rounds moments after each step."""

    @classmethod
    def prepare(cls, settings: Settings) -> Settings:
        load_torchao()
        return msgspec.structs.replace(settings, is_torchao_loaded=True)

    @property
    def kept(self) -> str:
        return "in 8 bits"

    def place(self, target: Target) -> None:
        target.keeper.close_moments(target.optimizers[0])

    def effect(self, target: Target) -> "LowBitEffect":
        return LowBitEffect(self.action, target)


class LowBitEffect(Effect):
    """Sees that moments of the optimizer that steps are in 8 bits between steps."""

    def __init__(self, action: LowBitState, target: Target) -> None:
        self.name = f"optimizer state in {action.bits} bits"
        self.expected = "between steps moments are in a byte an element"
        self._target = target

    def is_seen(self) -> bool:
        return self._target.keeper.num_low_bit > 0

    def contrary(self) -> str:
        optimizer = next(iter(self._target.optimizers), None)
        if optimizer is None or not optimizer.state or self._target.keeper.num_low_bit:
            return ""
        return (
            f"no moment of the {type(optimizer).__name__} is: its parameters are not in float32, lie with gaps or in "
            "another order in memory, or have less than 4,096 elements or no whole number of blocks of 256"
        )
