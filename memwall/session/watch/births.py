"""Notes what memory the tensors of a step take, and which line of the user's code made them; asks later what lives."""

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from memwall.torch_internals.compiler import is_region
from memwall.torch_internals.dispatch import StepMode, active_dispatch_modes, leave_mode
from memwall.torch_internals.storages import StorageWeakRef
from memwall.trace.source_lines import SourceLines


class Births(StepMode):
    """Notes from construction until `stop`; what it notes keeps nothing alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = SourceLines()
        self._born: dict[int, tuple[StorageWeakRef, int, int]] = {}
        """Storages by address: the reference, bytes, and index of the line."""
        self._thread, self._is_stopped = threading.get_ident(), False
        self.__enter__()  # type: ignore[no-untyped-call]

    @staticmethod
    def watching() -> tuple[int, ...]:
        """Returns the identities of those that watch this thread's operations now, without notes of a step."""
        return tuple(id(mode) for mode in active_dispatch_modes() if not isinstance(mode, Births))

    def stop(self) -> None:
        """Ends it. Safe to call twice; from another thread it stays there, notes nothing more, and ends with that."""
        if not self._is_stopped and threading.get_ident() == self._thread and self._is_innermost():
            leave_mode(self)
        self._is_stopped = True

    def living_bytes(self) -> dict[str, int]:
        """Returns the bytes noted that are still held, by line of the user's code, the most first."""
        living: Counter[str] = Counter()
        for reference, num_bytes, line in self._born.values():
            if not reference.expired():
                living[self._source.texts[line] if line >= 0 else ""] += num_bytes
        return dict(living.most_common())

    def _is_innermost(self) -> bool:
        modes = active_dispatch_modes()
        return bool(modes) and modes[-1] is self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_stopped and not is_region(func):
            for made in out if isinstance(out, (tuple, list)) else (out,):
                # Of a tensor that stands for others the parts are seen when they are made.
                if type(made) in (Tensor, nn.Parameter) and made.layout is torch.strided:
                    self._note(made)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not address or not num_bytes:
            return
        known = self._born.get(address)
        if known is None or known[0].expired():
            self._born[address] = StorageWeakRef(storage), num_bytes, self._source.find()
