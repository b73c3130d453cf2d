"""Follows the threads of a script: one of them may train, and what memwall refuses in any of them ends the script.

Python lets a thread that has raised end alone. The others, and the script itself, may wait for what it was to do.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from memwall.errors import MemwallError, UsageError
from memwall.patches import Patches


class TrainingThread:
    """Remembers the thread that trains, until that has ended: nothing of a session is made for two at a time.

    Args:
        script: its name, for messages.
    """

    def __init__(self, script: str) -> None:
        self._script, self._lock = script, threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_another(self) -> bool:
        """Tells whether a thread trains, and not the one that asks."""
        thread = self._thread
        return thread is not None and thread.ident != threading.get_ident() and thread.is_alive()

    @property
    def is_gone(self) -> bool:
        """Tells whether a thread has trained that has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def check(self, called: Any) -> None:
        """Hears that the present thread trains.

        Args:
            called: the module that it calls.

        Raises:
            UsageError: another one does.
        """
        with self._lock:
            if not self.is_another:
                self._thread = threading.current_thread()
                return
        raise UsageError(
            f"{self._script} trains in several threads: {type(called).__name__} was called with gradients on while "
            "another thread trained, and memwall plans the steps of one; train in one thread, or in processes that are "
            f"started by memwall run --nproc N --budget SIZE {self._script}; what other threads only ask a model they "
            "can ask under torch.no_grad()"
        )


class ThreadFailures:
    """Interrupts a script, which runs in the main thread, once another thread has ended with an error of memwall's.

    Args:
        explained: what a failure means to memwall; None where it is the script's own.
    """

    def __init__(self, explained: Callable[[BaseException], MemwallError | None]) -> None:
        self._explained, self._lock, self._is_over = explained, threading.Lock(), False
        self.failure: MemwallError | None = None
        """The first such error."""

    def listen(self, patches: Patches) -> None:
        """Hears of threads that end with an error, from now on."""
        patches.wrap(threading, "excepthook", self._ended)
        # What a shell starts in the background ignores interruptions, of which Python then hears nothing.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupted)
            patches.add("signal handler", "SIGINT", self._ignore_again)

    def end(self) -> None:
        """Hears that the script is over, and interrupts nothing any more."""
        try:
            with self._lock:
                self._is_over = True
                self._explained = lambda _: None  # each thread made meanwhile keeps the hook, and so this
            time.sleep(0)  # an interruption that is on its way comes here
        except KeyboardInterrupt:
            if self.failure is None:
                raise

    def _interrupted(self, *_: Any) -> None:
        if self.failure is not None:
            raise KeyboardInterrupt

    def _ignore_again(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _ended(self, original: Callable[..., Any], args: Any) -> None:
        error = args.exc_value
        found = error if isinstance(error, MemwallError) else self._explained(error)
        if found is None or found is not error:
            original(args)
        main = threading.main_thread().ident
        with self._lock:  # the second of two interruptions would end what the first has begun to close
            if found is not None and self.failure is None and not self._is_over and main is not None:
                self.failure = found.without_frames()
                signal.pthread_kill(main, signal.SIGINT)
