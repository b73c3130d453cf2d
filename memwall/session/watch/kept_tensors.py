"""Notices that a loop has come to hold more tensors between two steps, as a copy of its best weights, before the next.

Tensors are counted as the last step ends and as the next one begins: a batch may have come, what was evaluated gone.
What the loop takes there each time is usual; what it takes beside that is held in the next step, too.
"""

from collections.abc import Callable

from memwall.predict.first_step import FirstStep

_LEAST_BYTES = 4 << 20
"""The least that is noticed: batches differ by less."""


class KeptTensors:
    """Counts the bytes of tensors that a loop has come to hold between two steps.

    Args:
        known: returns what is known of the run, and with it what is to come so: plans have room for that.
    """

    def __init__(self, known: Callable[[], FirstStep | None]) -> None:
        self._known, self._come_bytes = known, 0
        self._ended_bytes: int | None = None
        self._num_changes = 0
        self._usual_bytes: int | None = None

    def end_step(self, live_bytes: int, num_changes: int) -> None:
        """Notes what tensors hold when a step has ended.

        Args:
            num_changes: how often the plan was changed so far: another one has tensors elsewhere.
        """
        self._ended_bytes, self._num_changes = live_bytes, num_changes

    def begin_step(self, live_bytes: int, num_changes: int) -> int:
        """Returns how many bytes of tensors have come since the last step, beside what is usual and expected.

        Args:
            live_bytes: what tensors hold as this step begins.
            num_changes: see `end_step`.
        """
        ended_bytes, self._ended_bytes = self._ended_bytes, None
        if ended_bytes is None or num_changes != self._num_changes:
            return 0
        risen_bytes = live_bytes - ended_bytes
        if self._usual_bytes is None:
            self._usual_bytes = risen_bytes
        kept_bytes = risen_bytes - self._usual_bytes
        if kept_bytes < _LEAST_BYTES:
            return 0
        known = self._known()
        expected_bytes = min(kept_bytes, max(0, known.kept_bytes - self._come_bytes)) if known is not None else 0
        self._come_bytes += expected_bytes
        return kept_bytes - expected_bytes
