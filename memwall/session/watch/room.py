"""Learns how much a loop takes between two steps where no hook sees it, as one that hashes or logs its weights does."""

from memwall.session.measurements import Measurements

_NUM_LEARNED = 3
"""Intervals between steps that are looked at: free pages that are returned have to be faulted in again by each step."""
_SAVED_IN_TURN = 3
"""Steps in a row after which a state dict was asked for: more of them keep an average of the weights, no checkpoint."""


class RoomBetweenSteps:
    """Says how many bytes are to be free between steps: at first what is asked for, then what was used of it.

    Args:
        measured: its meter tells the highest bytes since it was reset.
    """

    def __init__(self, measured: Measurements) -> None:
        self._measured = measured
        self._num_learned = 0
        self._used_bytes = 0
        self._held_bytes: int | None = None
        """Bytes that were held when the last step had ended; None where nothing is looked at."""
        self.is_made = True
        """Whether free memory was returned since the last step ended."""
        self._saved_after = self._num_saved_in_turn = 0
        """Step after which a state dict was asked for last, and after how many steps in a row."""

    def restart(self) -> None:
        """Looks anew: another plan is in effect."""
        self._num_learned = self._used_bytes = 0
        self._held_bytes = None

    def after_step(self, asked_bytes: int, *, is_cheap: bool = False) -> int:
        """Returns the bytes to leave free now that a step has ended, of which so many are asked for.

        Args:
            is_cheap: whether they cost next to nothing. All are left then: nobody knows that a step is the last one,
                and what follows that takes more than what follows others.
        """
        is_learning = self._num_learned < _NUM_LEARNED
        return asked_bytes if is_cheap or is_learning else min(asked_bytes, self._used_bytes)

    def begin_looking(self) -> None:
        """Looks at what follows a step, once room was made."""
        meter = self._measured.meter
        if self._num_learned < _NUM_LEARNED and meter.reset_peak():
            self._held_bytes = meter.now_bytes()

    def begin_making(self) -> bool:
        """Leaves this time out: a hook has seen what runs, and room is made for that.

        Returns:
            Whether none was made since the last step.
        """
        self._held_bytes = None
        was_made, self.is_made = self.is_made, True
        return not was_made

    def is_saved_in_turn(self) -> bool:
        """Notes that a state dict is asked for; returns whether it is after step upon step: page faults cost time."""
        num_steps = self._measured.num_steps
        if num_steps > self._saved_after:
            is_next = num_steps == self._saved_after + 1
            self._num_saved_in_turn = self._num_saved_in_turn + 1 if is_next else 1
            self._saved_after = num_steps
        return self._num_saved_in_turn > _SAVED_IN_TURN

    def before_step(self) -> None:
        """Notes what was used since the last step."""
        held_bytes, self._held_bytes = self._held_bytes, None
        if held_bytes is not None:
            self._num_learned += 1
            self._used_bytes = max(self._used_bytes, self._measured.meter.peak_bytes() - held_bytes)
