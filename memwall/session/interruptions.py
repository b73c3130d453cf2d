"""Puts interruptions off while a session closes: half of the parameters in memory and half on disk serve nobody."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memwall.patches import Patches

_log = logging.getLogger(__name__)
_MOST = 4
"""So many interruptions are an order: the disk may never answer."""


@contextmanager
def interruptions_put_off() -> Iterator[None]:
    """Has Ctrl-C answered when the block has ended; in the main thread, which alone is told of it.

    Raises:
        KeyboardInterrupt: there was one, and the script has no other answer to it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    seen: list[Any] = []

    def put_off(number: int, frame: Any) -> None:
        seen.append(frame)
        if len(seen) == 1:
            _log.warning("interrupted while what is on disk comes back into memory; this ends when all of it is back")
        if len(seen) >= _MOST:
            before(number, frame)

    signal.signal(signal.SIGINT, put_off)
    with Patches("puts interruptions off while a session closes") as patches:
        patches.add("signal handler", "SIGINT", lambda: signal.signal(signal.SIGINT, before))
        yield
    if seen:
        before(signal.SIGINT, seen[0])
