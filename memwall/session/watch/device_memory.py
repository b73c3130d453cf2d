"""Notices what grows beside the tensors of a CUDA device: free memory in pieces, and the host's memory."""

import logging
import math
from collections.abc import Callable

import torch

from memwall.machine.device_peaks import segment_bytes
from memwall.machine.limits import free_memory_bytes
from memwall.machine.meter import mapped_bytes, process_bytes
from memwall.session.watch.even_rise import EvenRise
from memwall.units import format_bytes

__all__ = ["DeviceMemoryWatch"]

_log = logging.getLogger(__name__)

_LEAST_BYTES = 16 << 20


class DeviceMemoryWatch:
    """Looks once a step at what a device's segments have free, and at the process on the host; says once that it grows.

    Args:
        device: a CUDA device.
        budget_bytes: returns what of it may be held; 0 where nothing was asked for.
    """

    def __init__(self, device: torch.device, budget_bytes: Callable[[], int]) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self._free, self._host = EvenRise(_LEAST_BYTES), EvenRise(_LEAST_BYTES)
        self._said: set[str] = set()

    def begin_step(self) -> None:
        """Looks; to be called when a step begins."""
        if "free" not in self._said:
            reserved_bytes, allocated_bytes = segment_bytes(self._device)
            self._free.add(reserved_bytes - allocated_bytes)
            room_bytes = self._budget_bytes() - reserved_bytes if self._budget_bytes() else math.inf
            if (rise := self._free.per_step(room_bytes)) is not None:
                self._said.add("free")
                _log.warning(
                    "reserved memory grows away from what tensors hold by %s with each step: %s are reserved, and %s "
                    "allocated as a step begins; it may be free in pieces that no tensor fits, as of batches of many "
                    "sizes: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or fewer sizes",
                    format_bytes(int(rise)),
                    format_bytes(reserved_bytes),
                    format_bytes(allocated_bytes),
                )
        if "host" not in self._said:
            self._host.add(process_bytes() - mapped_bytes())
            if self._host.may_rise and (rise := self._host.per_step(free_memory_bytes())) is not None:
                self._said.add("host")
                _log.warning(
                    "host memory grows by %s with each step: tensors that are kept there, Python objects, or what a "
                    "data loader of this process holds",
                    format_bytes(int(rise)),
                )
