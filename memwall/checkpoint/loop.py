"""The state of a training loop: the iteration it is in, generators of random numbers, and what it names itself."""

from typing import Any

from torch import nn

from memwall.checkpoint.companions import Companions, State
from memwall.checkpoint.training_state import Part, parts_of_model, random_states
from memwall.errors import UsageError


class LoopState:
    """Holds the state of a loop over `memwall.steps`; of another loop nothing is known.

    Attributes:
        is_open: whether the loop is one over `memwall.steps`.
    """

    def __init__(self, companions: Companions) -> None:
        self._companions = companions
        self._beside: State | None = None
        self.is_open = False
        self._position = 0
        self._stateful: dict[str, Any] = {}
        self._at_top: dict[str, Any] | None = None
        self._buffers: dict[str, Part] = {}

    def begin(self, stateful: dict[str, Any]) -> None:
        """Begins a loop, at its first iteration.

        Args:
            stateful: objects with `state_dict` and `load_state_dict`, by name.
        """
        self.is_open, self._position, self._stateful, self._at_top = True, 0, stateful, None

    def restore(self, saved: dict[str, Any] | None, directory: str) -> int:
        """Puts what the loop names where it was; returns the iteration that it is in.

        Args:
            saved: what `take` gave.
            directory: of the checkpoint, for an error.

        Raises:
            UsageError: the checkpoint was made by another loop.
        """
        if saved is None or saved["stateful"].keys() != self._stateful.keys():
            names = "no loop over memwall.steps" if saved is None else f"{sorted(saved['stateful']) or 'nothing'}"
            raise UsageError(
                f"the checkpoint in {directory} was made with {names}, and this loop goes on with "
                f"{sorted(self._stateful) or 'nothing'}; resume with the script that made it"
            )
        for name, value in self._stateful.items():
            value.load_state_dict(saved["stateful"][name])
        self._position = int(saved["position"])
        return self._position

    def at_top(self, position: int, *, is_due: bool) -> None:
        """Notes what an iteration begins with, before it fetches its batch; takes it down if a commit is due."""
        self._position, self._buffers = position, {}
        self._at_top = self._taken() if is_due else None
        self._beside = self._companions.take() if is_due else None

    def keep_buffers(self, model: nn.Module) -> None:
        """Copies, once an iteration, what a call without gradients may change before a model is called to be trained.

        A generator, say, whose norms count what its critic is shown.
        """
        if self.is_open and not self._buffers:
            volatile = (part for part in parts_of_model(model) if part.kind == "volatile")
            self._buffers = {part.name: part._replace(tensor=part.tensor.detach().clone()) for part in volatile}

    def parts_at_top(self, model: nn.Module) -> list[Part]:
        """Returns a model's tensors as they were at the top of the present iteration."""
        kept, self._buffers = self._buffers, {}
        return [kept.get(part.name, part) for part in parts_of_model(model)]

    def take(self) -> dict[str, Any] | None:
        """Returns the loop as it was at the top of the present iteration; None of one that shows nothing of itself."""
        if not self.is_open:
            return None
        taken, self._at_top = self._at_top, None
        return taken if taken is not None else self._taken()

    def take_beside(self) -> State:
        """Returns what goes with the model, as it was at the top of the present iteration if that is known."""
        taken, self._beside = self._beside, None
        return taken if taken is not None else self._companions.take()

    @property
    def given(self) -> tuple[Any, ...]:
        """Returns what the loop names itself."""
        return tuple(self._stateful.values())

    def _taken(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "stateful": {name: value.state_dict() for name, value in self._stateful.items()},
            "random": random_states(),
        }
