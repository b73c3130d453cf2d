"""The process of a run on a CUDA device that is here: its segments are those of the simulated caching allocator."""

from memwall.predict.cuda_allocator.step_peaks import least_reserved_bytes, reserved_peak_bytes
from memwall.predict.process import ProcessModel, Resident
from memwall.trace.records import Step, Trace

__all__ = ["LiveDeviceModel", "live_process"]


class LiveDeviceModel(ProcessModel):
    """Forecasts steps in the process that recorded a trace on a CUDA device.

    What the first step measured beyond its own forecast, as what closed libraries hold, is in `workspace_bytes`.
    """

    gives_back = True

    def free(self, step: Step) -> Resident:
        return self.untreated(step)

    def untreated(self, step: Step) -> Resident:
        reserved_bytes = reserved_peak_bytes(step)
        assert reserved_bytes is not None, "memory without end is never full"
        return self._resident(reserved_bytes)

    def treated(self, step: Step, limit_bytes: int) -> Resident:
        return self.untreated(step)

    def crowded(self, step: Step, limit_bytes: int) -> Resident:
        """Forecasts the step of an allocator that is held to the limit: it frees its cache before it passes that."""
        untreated = self.untreated(step)
        if untreated.process_bytes <= limit_bytes:
            return untreated
        held_bytes = reserved_peak_bytes(step, capacity_bytes=max(0, limit_bytes - self._beyond_tensors))
        return self._resident(least_reserved_bytes(step) if held_bytes is None else held_bytes)

    def fits_untouched(self, process_bytes: int, *, budget_bytes: int, limit_bytes: int) -> bool:
        """Tells whether a forecast keeps to the limit: the allocator was simulated, so nothing is left to chance."""
        return process_bytes <= limit_bytes

    def reserved_bytes(self, process_bytes: int) -> int:
        return process_bytes - self.base_bytes

    def _resident(self, reserved_bytes: int) -> Resident:
        return Resident(
            policy="default",
            is_default=True,
            process_bytes=self._beyond_tensors + reserved_bytes,
            fault_seconds=0.0,
        )


def live_process(trace: Trace) -> ProcessModel:
    """Returns the process that a trace was recorded in, on the device it was recorded on."""
    return LiveDeviceModel(trace) if trace.device == "cuda" else ProcessModel(trace)
