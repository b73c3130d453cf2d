"""Sees whether the actions of a plan do anything, in the first steps under it, from counts that handlers keep anyway.

A wrapper that a loop goes past, a second checkpoint around the first, an autocast switched off inside the model: all of
them train on without a word, and without what the plan promised. The run stops there instead.
"""

import logging
from collections.abc import Iterable

from memwall.errors import MemwallError, NoEffectError

_log = logging.getLogger(__name__)

PATIENCE_STEPS = 2
"""After so many steps an action that has shown neither effect nor the lack of one is named in the log."""


class Effect:
    """Watches one applied action until it is seen to have an effect; the technique says how."""

    name: str
    """Says what the plan's table calls it, and where it acts."""
    expected: str
    """Says what it should do in each step."""

    def is_seen(self) -> bool:
        """Returns whether it has done that."""
        raise NotImplementedError

    def contrary(self) -> str:
        """Returns what the steps so far show instead; "" while they show nothing, as where a block did not run."""
        raise NotImplementedError

    def close(self) -> None:
        """Takes away what was only there to look."""


class Effects:
    """Watches the effects of one applied plan, each until it is seen."""

    def __init__(self, effects: Iterable[Effect]) -> None:
        self._open = list(effects)
        self._num_steps = 0
        self.failure: MemwallError | None = None
        """Holds what `check` raised: a loop may catch it."""

    @property
    def are_seen(self) -> bool:
        """Returns whether nothing is watched any more."""
        return not self._open

    def check(self) -> None:
        """Looks at each effect that was not seen yet; to be called after each optimizer step.

        Raises:
            NoEffectError: an action has none.
        """
        if not self._open:
            return
        self._num_steps += 1
        for effect in list(self._open):
            if found := effect.contrary():
                error = NoEffectError(action=effect.name, expected=effect.expected, found=found)
                self.failure = error.without_frames()
                raise error
            if effect.is_seen():
                effect.close()
                self._open.remove(effect)
        if self._open and self._num_steps == PATIENCE_STEPS:
            names = ", ".join(effect.name for effect in self._open)
            _log.info(
                "these actions were not seen at work in the first %d steps, and are watched on: %s",
                PATIENCE_STEPS,
                names,
            )

    def forget(self, effect: Effect) -> None:
        """Ends the watch of one, if it is still watched."""
        if effect in self._open:
            effect.close()
            self._open.remove(effect)

    def close(self) -> None:
        """Ends the watch."""
        while self._open:
            self._open.pop().close()
