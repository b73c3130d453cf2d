"""The process of a run on a CUDA device that is here: its segments are those of the simulated caching allocator.

Where the recorded step has left what outlives it decides how later ones find room: workspaces and the optimizer's state
came into being between that step's activations, in segments which they hold on to.
"""

from collections import defaultdict, deque

from memwall.predict.cuda_allocator.held_blocks import Held, Standing
from memwall.predict.cuda_allocator.step_peaks import least_reserved_bytes, reserved_peak_bytes
from memwall.predict.process import ProcessModel, Resident
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step


class LiveDeviceModel(ProcessModel):
    """Forecasts steps in the process that recorded a trace on a CUDA device.

    What the first step measured beyond its own forecast, as what closed libraries hold, is in `workspace_bytes`.
    """

    gives_back = True

    def __init__(self, trace: Trace, held: Held | None = None) -> None:
        super().__init__(trace)
        self._standing = None if held is None else _standing(held, steady_step(trace))
        others_bytes = 0 if self._standing is None else self._standing.others_bytes
        self._beside_bytes = self.base_bytes + max(0, self.workspace_bytes - others_bytes)
        """Counts what is not in simulated segments: of what the first step measured, blocks that are held are."""

    def free(self, step: Step) -> Resident:
        return self.untreated(step)

    def untreated(self, step: Step) -> Resident:
        reserved_bytes = reserved_peak_bytes(step, standing=self._standing)
        assert reserved_bytes is not None, "memory without end is never full"
        return self._resident(reserved_bytes)

    def treated(self, step: Step, limit_bytes: int) -> Resident:
        return self.untreated(step)

    def crowded(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the step of an allocator that is held to the limit: it frees its cache before it passes that."""
        untreated = self.untreated(step)
        if untreated.process_bytes <= limit_bytes:
            return untreated
        room_bytes = max(0, limit_bytes - self._beside_bytes)
        held_bytes = reserved_peak_bytes(step, capacity_bytes=room_bytes, standing=self._standing)
        return self._resident(least_reserved_bytes(step, self._standing) if held_bytes is None else held_bytes)

    def fits_untouched(self, process_bytes: int, *, budget_bytes: int, limit_bytes: int) -> bool:
        """Tells whether a forecast keeps to the limit: the allocator was simulated, so nothing is left to chance."""
        return process_bytes <= limit_bytes

    def reserved_bytes(self, process_bytes: int) -> int:
        return process_bytes - self.base_bytes

    def _resident(self, reserved_bytes: int) -> Resident:
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self._beside_bytes + reserved_bytes,
            fault_seconds=0.0,
        )


def live_process(trace: Trace, held: Held | None = None) -> ProcessModel:
    """Returns the process that a trace was recorded in, on the device it was recorded on.

    Args:
        held: what the allocator of a CUDA device holds now, between two steps; None where that is not known.
    """
    return LiveDeviceModel(trace, held) if trace.device == "cuda" else ProcessModel(trace)


def _standing(held: Held, step: Step) -> Standing:
    """Returns what is held with the blocks that a step begins with or leaves behind: those of their sizes."""
    places: defaultdict[int, deque[int]] = defaultdict(deque)
    for index, block in enumerate(held.blocks):
        places[block.requested_bytes].append(index)
    outlive = [s for s in step.storages if s.device.startswith("cuda") and (s.birth < 0 or s.death >= len(step.ops))]
    found = (places[s.nbytes].popleft() for s in sorted(outlive, key=lambda s: s.birth) if places[s.nbytes])
    return Standing(held=held, of_step=tuple(found))
