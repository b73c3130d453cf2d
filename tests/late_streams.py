"""A stand-in for CUDA streams on a CPU: what is launched runs late, in any order that the events between streams allow.

It shows which orders are possible, not how long anything takes; it knows no caching allocator.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LateDevice", "LateEvent", "LateStream", "install"]


class LateEvent:
    """The first `num_items` of what was launched on a stream are done."""

    def __init__(self, stream: "LateStream", num_items: int) -> None:
        self.stream, self.num_items = stream, num_items

    @property
    def has_happened(self) -> bool:
        return self.stream.num_done >= self.num_items

    def synchronize(self) -> None:
        self.stream.device.run_until(self)


class LateStream:
    """Work and waits in the order in which they were launched."""

    def __init__(self, device: "LateDevice") -> None:
        self.device = device
        self.items: list[Callable[[], object] | LateEvent] = []
        self.num_done = 0
        device.streams.append(self)

    def launch(self, item: Callable[[], object] | LateEvent) -> None:
        self.items.append(item)

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self.items))

    def wait_event(self, event: LateEvent) -> None:
        names = self.device.names()
        if (names[self], names[event.stream]) != self.device.dropped_wait:
            self.launch(event)

    def wait_stream(self, other: "LateStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.run_until(self.record_event())

    @property
    def next_item(self) -> Callable[[], object] | LateEvent | None:
        """What would run next, had it all it waits for."""
        return self.items[self.num_done] if self.num_done < len(self.items) else None


class PromptStream(LateStream):
    """Runs at once, after what it must wait for and nothing else: for work that is not launched but simply done."""

    def launch(self, item: Callable[[], object] | LateEvent) -> None:
        super().launch(item)
        self.device.run_until(self.record_event())


class LateDevice:
    """The stream that is current at first, and all others.

    Args:
        computes_late: whether work on the first stream is launched, within `on`, like that of the others.
    """

    def __init__(self, *, computes_late: bool) -> None:
        self.streams: list[LateStream] = []
        self.compute = (LateStream if computes_late else PromptStream)(self)
        self.dropped_wait: tuple[str, str] | None = None
        """Of which stream on which other a program is to forget its waits."""
        self.registered_bytes: dict[int, int] = {}

    def names(self) -> dict[LateStream, str]:
        """In the order in which `PinnedSpace` makes its streams."""
        return dict(zip(self.streams, ("compute", "outward", "inward"), strict=False))

    def run_until(self, event: LateEvent) -> None:
        """Runs what an event waits for, and as little else as possible."""
        stream = event.stream
        while stream.num_done < event.num_items:
            item = stream.items[stream.num_done]
            if isinstance(item, LateEvent):
                self.run_until(item)
            else:
                item()
            stream.num_done += 1

    def run_all(self, order: Sequence[str]) -> None:
        """Runs everything; of the streams that could go on always the first one in this order."""
        by_name = {name: stream for stream, name in self.names().items()}
        while ready := [s for s in (by_name[n] for n in order) if _can_go_on(s)]:
            item = ready[0].next_item
            if callable(item):
                item()
            ready[0].num_done += 1
        assert all(stream.next_item is None for stream in self.streams)

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """What changes tensors in place is launched on a stream, and nothing else is done."""
        with _Launching(stream):
            yield

    # -- cudart ------------------------------------------------------------------------------------------------------

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        self.registered_bytes[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered_bytes[address]
        return 0


def install(device: LateDevice, patch: pytest.MonkeyPatch) -> None:
    """Puts it in the place of torch's."""
    patch.setattr(torch.cuda, "Stream", lambda _: LateStream(device))
    patch.setattr(torch.cuda, "current_stream", lambda _: device.compute)
    patch.setattr(torch.cuda, "stream", device.on)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "cudart", lambda: device)


def _can_go_on(stream: LateStream) -> bool:
    item = stream.next_item
    return item.has_happened if isinstance(item, LateEvent) else item is not None


class _Launching(TorchFunctionMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not name.endswith("_") or name.endswith("__"):
            return func(*args, **(kwargs or {}))
        self._stream.launch(lambda: func(*args, **(kwargs or {})))
        return args[0]
