"""Times steps: on a CPU by the clock, on a CUDA device by events at their borders, which are read a step later.

The host runs ahead of a device. Its own clock would measure launches; to wait for the device would have it stand idle.
"""

import time
from collections.abc import Callable

import torch


class StepClock:
    """Measures one step after the other.

    Args:
        note: is told the seconds of a step, once they are known.
    """

    def __init__(self, note: Callable[[float], None]) -> None:
        self._note = note
        self._device = torch.device("cpu")
        self._begin = 0.0
        self._begun: torch.cuda.Event | None = None
        self._last: Callable[[], float] | None = None
        """Returns the seconds of the last step, whose end the device may not have reached."""

    def begin(self, device: torch.device) -> None:
        """Says that a step begins of a model on this device."""
        self._device, self._begin = device, time.perf_counter()
        self._begun = self._event() if device.type == "cuda" else None

    def end(self, *, is_first: bool) -> None:
        """Says that the step has ended.

        Args:
            is_first: whether its first optimizer has stepped; a further one makes the same step longer.
        """
        if is_first:
            self.settle()
        if self._begun is None:
            seconds = time.perf_counter() - self._begin
            self._last = lambda: seconds
            return
        begun, ended = self._begun, self._event()

        def on_device() -> float:
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3

        self._last = on_device

    def settle(self) -> None:
        """Notes the step that has ended, and waits for the device to have done it."""
        last, self._last = self._last, None
        if last is not None:
            self._note(last())

    def forget(self) -> None:
        """Leaves the last step out: it ran under a plan that is no more."""
        self._last = None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
