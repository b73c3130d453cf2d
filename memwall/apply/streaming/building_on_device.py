"""Has parameters leave a CUDA device for the host's memory while modules are still being built there."""

import functools
import logging
from collections.abc import Callable

import torch

from memwall.apply.streaming.building import Building, leaves_no_room
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import HostPlace
from memwall.machine.meter import CudaMeter
from memwall.planning.techniques.parameters import MIN_PARAMETER_BYTES
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


def building_on_device(budget_bytes: int, window_bytes: int, host_limit: Callable[[], int]) -> Building:
    """Returns what has parameters leave a CUDA device, the one of the first, for the host's memory as they are made."""

    @functools.cache
    def meter() -> CudaMeter:
        return CudaMeter(building.device or torch.device("cuda", torch.cuda.current_device()))

    def opened() -> ParameterTier:
        _log.info("parameters go to host memory as they are made: %s have no room for them", format_bytes(budget_bytes))
        place = HostPlace(meter().place, limit_bytes=host_limit())
        return ParameterTier(place, window_bytes=window_bytes, min_bytes=MIN_PARAMETER_BYTES)

    def held_bytes() -> int:
        return meter().now_bytes()

    must_leave = leaves_no_room(budget_bytes, window_bytes, held_bytes)
    building = Building(must_leave, opened, device_type="cuda", held_bytes=held_bytes)
    return building
