"""Moves what a step saves for backward to disk from the moment on at which the process holds too much.

Nothing is loaded for that before. What is freed from then on is returned to the system before the process holds three
quarters of its budget: malloc keeps it, and a backward that is differentiated, as that of a physics-informed network,
frees and makes blocks of many sizes.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from memwall.errors import ApplyError
from memwall.machine.meter import process_bytes
from memwall.patches import undo_all
from memwall.torch_internals.autograd import SavedTensorHooksBeneath
from memwall.torch_internals.saved import Kept, check_unmodified

_log = logging.getLogger(__name__)

_SHARE_OF_BUDGET = 3
"""Quarters of the budget that a process holds when free pages are returned: the last is for what is in no tensor."""


class LateParking:
    """Has tensors that are saved for backward go to disk once a process holds too much, and stay before that.

    Args:
        most_bytes: what the process may hold before they do, a quarter of its budget.
        disk: the folder; None for the default one.
        capacity_bytes: the most to take of it; None for what is free there.
    """

    def __init__(self, most_bytes: int, disk: str | None, capacity_bytes: int | None) -> None:
        self._most_bytes, self._disk, self._capacity_bytes = most_bytes, disk, capacity_bytes
        self._hooks: SavedTensorHooksBeneath | None = None
        self._thread = 0
        self._model: nn.Module | None = None
        self._engine: Any = None
        self._ends: list[Callable[[], None]] = []

    def begin(self, model: nn.Module) -> None:
        """Looks at what is saved from now on, in this thread."""
        if self._hooks is not None:
            return
        self._model, self._thread = model, threading.get_ident()
        self._hooks = SavedTensorHooksBeneath(self._pack, self._unpack)
        self._hooks.begin()

    def end(self) -> None:
        """Ends that; what is on disk stays there until the backward that needs it. Safe to call twice.

        What torch keeps for each thread can be taken away in that thread alone; left in another, it does nothing.
        """
        hooks, self._hooks, self._model = self._hooks, None, None
        if hooks is not None and threading.get_ident() == self._thread:
            hooks.end()
        self._engine = None
        ends, self._ends = self._ends, []
        undo_all(ends)

    def _pack(self, tensor: Tensor) -> Any:
        if self._hooks is None or (self._engine is None and process_bytes() <= self._most_bytes):
            return Kept(tensor)
        if self._engine is None:
            self._open()
        return self._engine, self._engine.pack(tensor)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Kept):
            check_unmodified(saved)
            return saved.tensor
        engine, moved = saved
        tensor: Tensor = engine.unpack(moved)
        return tensor

    def _open(self) -> None:
        # 10 MiB and 0.3 s, that few runs need
        from memwall.apply.memory.allocator import AllocatorHandler
        from memwall.apply.offload.parking import open_engine
        from memwall.planning.menu import WINDOW_BYTES, recorded_min_bytes

        assert self._model is not None
        self._engine, close = open_engine(
            [self._model],
            disk=self._disk,
            capacity_bytes=self._capacity_bytes,
            window_bytes=WINDOW_BYTES,
            min_bytes=recorded_min_bytes("cpu"),
            holds_sources=False,
        )
        allocator = AllocatorHandler()
        self._ends += [close, allocator.undo]
        with suppress(ApplyError):  # another session has the heap, or there are no addresses for it: malloc does, too
            allocator.apply_tight(_SHARE_OF_BUDGET * self._most_bytes, WINDOW_BYTES)
        _log.info("the first step holds more than a quarter of its budget: what is saved from here on goes to disk")
