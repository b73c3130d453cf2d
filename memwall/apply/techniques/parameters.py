"""Parameters and gradients on the next tier between their uses."""

from memwall.apply.effect import Effect
from memwall.apply.state_technique import StateHandler
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import Handler, Target, TierName, register
from memwall.errors import ApplyError
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.units import format_bytes

# A last block may wait for the backward that does not come, and what the loop has read itself.
_PRESENT_SHARE = 0.5


@register("parameter-placement")
class ParameterHandler(Handler[ParameterPlacement]):
    """Streams parameters through forward, backward and step."""

    can_be_built_away = True

    @classmethod
    def absent(cls, target: Target) -> None:
        target.parameters.bring_back()

    def apply(self, target: Target) -> None:
        if not any(isinstance(handler, StateHandler) and handler.is_away for handler in target.handlers):
            raise ApplyError(
                f"the plan keeps parameters on the {self.action.tier} and the optimizer's state in memory; a step has "
                "a few parameters in memory only where their state comes from there too: make the plan again with "
                "`memwall plan`"
            )
        target.on_undo(target.parameters.bring_back, is_state=True)
        target.parameters.place(target.model, self.action, host_limit_bytes=target.host_limit_bytes or 0)

    def effect(self, target: Target) -> "ParameterEffect":
        return ParameterEffect(self.action, target.parameters)

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        target.parameters.set_proving(is_proving)

    def held_bytes(self, tier: TierName) -> int:
        return (self.action.saved_bytes or 0) if self.action.tier == tier else 0


_WHY_PRESENT = (
    "the script holds tensors or numpy arrays that share memory with them (parameter.detach(), .numpy(): keep a copy "
    "instead), or uses them outside their modules; else make the plan without them on disk"
)


class ParameterEffect(Effect):
    """Sees that parameters are on disk between steps, or gradients of those that stay in memory were."""

    def __init__(self, action: ParameterPlacement, parameters: ParameterKeeper) -> None:
        self.name = f"parameters on the {action.tier}"
        self.expected = f"between steps parameters and gradients, {format_bytes(action.saved_bytes or 0)}, are away"
        self._parameters, self._stays = parameters, bool(action.staying)
        self._num_spilled = parameters.num_spilled  # by a step that was recorded

    def is_seen(self) -> bool:
        return not self.contrary()

    def contrary(self) -> str:
        if found := self._present():
            self._parameters.await_writes()  # a disk may be slower than the loop
            found = self._present()
        return found

    def _present(self) -> str:
        away_bytes, absent_bytes = self._parameters.away_bytes, self._parameters.absent_bytes
        if away_bytes == 0 and self._stays and self._parameters.num_spilled > self._num_spilled:
            return ""
        if away_bytes and absent_bytes >= _PRESENT_SHARE * away_bytes:  # one of two blocks may wait like that
            return ""
        if away_bytes == 0:
            if why := self._parameters.why_given_up:
                return f"{why}, which needs all of them in memory: make the plan without them on disk"
            return f"all of them are in memory: {_WHY_PRESENT}"
        return f"{format_bytes(away_bytes - absent_bytes)} of {format_bytes(away_bytes)} are in memory: {_WHY_PRESENT}"
