"""The place of parameters and gradients between their uses: seen in what is away, or has left."""

from memwall.apply.streaming.keeper import ParameterKeeper
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.units import format_bytes

__all__ = ["ParameterEffect"]

# A last block may wait for the backward that does not come, and what the loop has read itself.
_PRESENT_SHARE = 0.5


class ParameterEffect:
    """Parameters are on disk between steps; of those that stay in memory, gradients have been there."""

    def __init__(self, action: ParameterPlacement, parameters: ParameterKeeper) -> None:
        self.name = f"parameters on the {action.tier}"
        self.expected = f"between steps parameters and gradients, {format_bytes(action.saved_bytes or 0)}, are away"
        self._parameters, self._stays = parameters, bool(action.staying)
        self._num_spilled = parameters.num_spilled  # by a step that was recorded

    def is_seen(self) -> bool:
        """See `Effect`."""
        return not self.contrary()

    def contrary(self) -> str:
        """See `Effect`."""
        away_bytes, absent_bytes = self._parameters.away_bytes, self._parameters.absent_bytes
        if away_bytes == 0 and self._stays and self._parameters.num_spilled > self._num_spilled:
            return ""
        if absent_bytes > _PRESENT_SHARE * away_bytes:
            return ""
        if away_bytes == 0:
            return "all of them are in memory: they share it with other tensors, or are used outside their modules"
        return (
            f"{format_bytes(away_bytes - absent_bytes)} of {format_bytes(away_bytes)} are in memory: the loop holds "
            "tensors that share memory with parameters, or they are used outside their modules"
        )

    def close(self) -> None:
        """See `Effect`."""
