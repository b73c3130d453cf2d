"""Hears what autograd saves while a step is recorded, and lets go of.

The recorder only observes; if it is given a `Parking`, that decides where saved tensors live meanwhile, and the trace
still describes the plain step.
"""

from typing import Any, Protocol

from torch import Tensor

from memwall.torch_internals.autograd import SavedTensorHooksBeneath
from memwall.torch_internals.compiler import unseen
from memwall.trace.event_log import EventLog
from memwall.trace.gathered import Gathered


class Parking(Protocol):
    """Says where saved tensors live between forward and backward while a step is recorded."""

    def pack(self, tensor: Tensor, /) -> object:
        """Takes a tensor that autograd saves; returns a handle, with the tensor as its `tensor` if it was kept."""

    def unpack(self, saved: Any, /) -> Tensor:
        """Gives back the tensor of a handle, or the kept tensor."""


class _Held:
    """Stands in autograd for a saved tensor; its end is the moment backward let go."""

    __slots__ = ("index", "log", "packed")

    def __init__(self, packed: object, index: int, log: EventLog) -> None:
        self.packed, self.index, self.log = packed, index, log

    def __del__(self) -> None:
        self.log.saved_released(self.index)


class SavedTensors:
    """Notes in the log what is saved between `begin` and `end`.

    Args:
        parking: where it goes; None keeps it, as a plain step does.
        gathered: parameters that FSDP2 has gathered, of which views are saved.

    Attributes:
        num_paused: how many callers leave out what runs now: what autograd saves is parked, and not noted.
    """

    def __init__(self, log: EventLog, parking: Parking | None, gathered: Gathered) -> None:
        self._log, self._parking, self._gathered = log, parking, gathered
        self._hooks: SavedTensorHooksBeneath | None = None
        self.num_paused = 0

    @property
    def is_on(self) -> bool:
        """Returns whether a step is being recorded."""
        return self._hooks is not None

    def begin(self) -> None:
        """Hears what this thread saves from now on."""
        self._hooks = SavedTensorHooksBeneath(unseen(self._pack), unseen(self._unpack))
        self._hooks.begin()

    def end(self, *, is_here: bool) -> None:
        """Notes nothing any more.

        Args:
            is_here: whether this is the thread that began, where alone the hooks can be taken away.
        """
        hooks, self._hooks = self._hooks, None
        if hooks is not None and is_here:
            hooks.end()

    def _pack(self, tensor: Tensor) -> object:
        if self._hooks is None or self._gathered.holds(tensor):
            return tensor
        if self.num_paused:
            return tensor if self._parking is None else self._parking.pack(tensor)
        index = self._log.saved(tensor)
        self.num_paused += 1
        try:
            packed = tensor if self._parking is None else self._parking.pack(tensor)
        finally:
            self.num_paused -= 1
        self._log.savings[index].was_moved = packed is not tensor and getattr(packed, "tensor", None) is None
        return _Held(packed, index, self._log)

    def _unpack(self, held: object) -> Tensor:
        if isinstance(held, Tensor):
            return held
        if not isinstance(held, _Held):  # saved while nobody looked
            assert self._parking is not None
            return self._parking.unpack(held)
        self._log.saved_unpacked(held.index)
        if self._parking is None:
            assert isinstance(held.packed, Tensor)
            return held.packed
        self.num_paused += 1
        try:
            tensor = self._parking.unpack(held.packed)
        finally:
            self.num_paused -= 1
        self._log.alias(tensor, held.index)
        return tensor
