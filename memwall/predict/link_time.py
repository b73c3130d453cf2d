"""The time of moving beside computing: the bounds of a step, and the batch from which on computing can hide it.

With R bytes read and W written in an optimizer step over a link of the speeds r and w, of which one direction is
counted on at a time, T_io = R/r + W/w. Perfect overlap makes a step of max(T_compute, T_io), none T_compute + T_io.
What an optimizer step moves does not grow with its batch, as arithmetic does: from some batch on it can be hidden.
"""

from typing import Literal

from msgspec import Struct

_SECONDS_PER_DAY = 86_400


class LinkTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what one optimizer step moves to the next tier and back, and computes."""

    tier: Literal["disk", "host"]
    written_bytes: int
    read_bytes: int
    batched_bytes: int
    """The part of both, each way, that grows with the batch: saved tensors."""
    write_bytes_per_second: float
    """Measured before the run, alone; of a device that is not here the published one."""
    read_bytes_per_second: float
    compute_seconds: float
    """Seconds of the step under the plan, recomputation included, if moving took no time."""
    fixed_seconds: float = 0.0
    """The part of those that does not grow with the batch: the optimizer's."""
    tier_total_bytes: int = 0
    """The size of the disk; 0 where it is not known."""

    @property
    def moving_seconds(self) -> float:
        """Returns the seconds that the link takes by itself."""
        return self._seconds(self.written_bytes, self.read_bytes)

    @property
    def ideal_seconds(self) -> float:
        """Returns seconds that no step can be shorter than: all of one is hidden behind the other."""
        return max(self.compute_seconds, self.moving_seconds)

    @property
    def serial_seconds(self) -> float:
        """Returns the seconds of a step in which nothing overlaps."""
        return self.compute_seconds + self.moving_seconds

    def hiding_samples(self, num_samples: int) -> float:
        """Returns samples in a step from which on computing takes as long as moving; infinite where that grows as fast.

        Args:
            num_samples: of the step as it is.
        """
        batched_seconds = self._seconds(self.batched_bytes, self.batched_bytes)
        left_seconds = self.compute_seconds - self.fixed_seconds - batched_seconds
        if left_seconds <= 0:
            return float("inf")
        standing_seconds = self.moving_seconds - batched_seconds - self.fixed_seconds
        return num_samples * max(0.0, standing_seconds) / left_seconds

    def written_bytes_per_day(self, step_seconds: float) -> float:
        """Returns the bytes that are written in a day of such steps."""
        return self.written_bytes / step_seconds * _SECONDS_PER_DAY

    def _seconds(self, written_bytes: int, read_bytes: int) -> float:
        return written_bytes / self.write_bytes_per_second + read_bytes / self.read_bytes_per_second
