"""Whether a recorded run would fit on a device that is not here: its requests through the allocator of a smaller card.

That is L3 of three levels of claim, the edge of a device's memory: what the allocator can have there is an interval,
since the CUDA context is one, and so is the answer.
"""

from typing import Literal

from msgspec import Struct

from memwall.machine.hardware import Hardware
from memwall.predict.cuda_allocator.allocator_settings import format_settings, parse_settings
from memwall.predict.cuda_allocator.event_replay import Figures, replay
from memwall.predict.cuda_allocator.settings_search import search_settings
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.predict.snapshot.compared_settings import events_of_recording
from memwall.predict.snapshot.device_history import DeviceHistory
from memwall.trace.tags import Tag

__all__ = ["FitOnDevice", "Outcome", "fits_on"]

Outcome = Literal["fits", "fits, giving back cached memory", "fits only with the smallest context", "does not fit"]


class FitOnDevice(Struct, frozen=True, kw_only=True):
    """Says how a recorded run fares under one setting of the allocator on another device. All of it is simulated."""

    tag: Tag = "simulated"
    level: Literal["L3 edge of memory"] = "L3 edge of memory"
    recorded_device: int
    """Number of the device that the run was recorded on."""
    device: str
    settings: str
    """The complete configuration string."""
    capacity_bytes: tuple[int, int]
    """Least and most that the allocator can have there: the device's memory without the published range of contexts."""
    outcome: Outcome
    reserved_bytes: int
    """Peak with the least there can be; where the run does not fit, up to the request that failed."""
    num_retries: int
    """How often cached memory had to be given back for a request, which takes time; with the least there can be."""


def fits_on(analysis: DeviceAnalysis, recording: DeviceHistory, hardware: Hardware) -> tuple[FitOnDevice, ...]:
    """Answers under the recorded settings first, then under the best ones for the device; () where nothing is known.

    Args:
        analysis: of the same device, with its settings compared.
    """
    search = analysis.settings
    if search is None:
        return ()
    profile, _ = profile_for(search.torch_version)
    recorded = parse_settings(search.recorded_settings, profile)
    trace = events_of_recording(recording, recorded)
    assert trace is not None, "settings are compared only where the requests are known"
    least_context, most_context = hardware.context_bytes
    capacity_bytes = (hardware.usable_bytes - most_context, hardware.usable_bytes - least_context)
    choice = search_settings(trace, search.torch_version, capacity_bytes=capacity_bytes[0])

    def fit(text: str) -> FitOnDevice:
        settings = parse_settings(text, profile)
        least, most = (replay(trace, settings, profile, capacity_bytes=nbytes) for nbytes in capacity_bytes)
        return FitOnDevice(
            recorded_device=analysis.device,
            device=hardware.name,
            settings=text,
            capacity_bytes=capacity_bytes,
            outcome=_outcome(least, most),
            reserved_bytes=least.reserved_peak_bytes,
            num_retries=least.num_alloc_retries,
        )

    return tuple(fit(text) for text in dict.fromkeys((search.recorded_settings, format_settings(choice.settings))))


def _outcome(least: Figures, most: Figures) -> Outcome:
    if least.is_out_of_memory:
        return "does not fit" if most.is_out_of_memory else "fits only with the smallest context"
    return "fits, giving back cached memory" if least.num_alloc_retries else "fits"
