"""Has room made for the operations of a step, each of which is repeated where it found no memory."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from memwall.store.room import CudaLimit, with_room
from memwall.torch_internals.compiler import is_region
from memwall.torch_internals.dispatch import StepMode, leave_mode
from memwall.torch_internals.operators import schema_of


class Yielding(StepMode):
    """Has a limit give way from construction until `stop`, or has others make room.

    Operations that write into a tensor are not repeated: they may have begun to. Nor is compiled code, which lets go of
    what it was given, nor another operation that stands for a function: the limit ends where the step has one.
    """

    def __init__(
        self,
        limit: CudaLimit,
        *,
        gives: bool = True,
        make_room: Callable[[torch.OutOfMemoryError], bool] = lambda _: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit, self._make_room = limit, make_room
        self._thread, self._is_stopped = threading.get_ident(), False
        if gives:
            limit.begin_giving()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Ends it. Safe to call twice; from another thread it stays there, does nothing more, and ends with that."""
        self._limit.end_giving()
        if not self._is_stopped and threading.get_ident() == self._thread:
            leave_mode(self)
        self._is_stopped = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_region(func):
            self._limit.lift()
            return func(*args, **kwargs)
        if self._is_stopped or schema_of(func).is_mutable:
            return func(*args, **kwargs)
        random = self._random_of(func, kwargs)
        if random is None:
            return with_room(lambda: func(*args, **kwargs), make_room=self._make_room)
        offset = random.get_offset()
        return with_room(
            lambda: func(*args, **kwargs),
            before_again=lambda: random.set_offset(offset),
            make_room=self._make_room,
        )

    def _random_of(self, func: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what an operation draws random numbers from, which it may have done before it failed."""
        if torch.Tag.nondeterministic_seeded not in func.tags or self._limit.place is None:
            return None
        given = kwargs.get("generator")
        if given is None:
            return torch.cuda.default_generators[self._limit.place.index or 0]
        return given if given.device.type == "cuda" else None
