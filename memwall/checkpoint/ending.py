"""Ends a run that is told to end (SIGTERM, Ctrl-C) where it loses nothing: once the step that runs is committed.

Who sends SIGTERM sends SIGKILL soon after, often in ten seconds. A step that would not be committed in seven is not
waited for: the run ends at once, at the last committed one. Where the script has a handler of its own that stays.

Python hears a signal between two operations alone, and all of a backward may be one. A thread looks after that. What a
script does then in its `finally:` and by atexit takes as long as it takes. Python's own end after that may take longer
than all the rest beside other work: a deadline ends it.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from memwall.checkpoint.deadline import exit_in
from memwall.logs import log_to_standard_error
from memwall.patches import Patches, note_permanent

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 7.0
_LAST_SECONDS = 0.5
"""Time that is left after that to an operation that does not end."""
_MOST_SECONDS, _LEAST_SECONDS = 6.7, 0.3
"""Time from SIGTERM until Python's own end is cut short, and what that has in any case.

Beside other work the system may take two seconds more to take a process down.
"""
_DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}

_present: "Ending | None" = None
_ended: "Ending | None" = None
"""Names the ending by which SIGTERM has ended a run of this process; None while none has."""
_is_over = False
"""Whether nothing but the process's end follows that."""


class Ending:
    """Hears that the run is to end."""

    def __init__(self) -> None:
        self._begin, self._step_seconds, self._commit_seconds = time.monotonic(), 0.0, 0.0
        self._asked_by: int | None = None
        self._pipe: tuple[int, int] | None = None
        self._has_ended = threading.Event()
        self._told_at = 0.0
        """When SIGTERM came."""
        _look_after_exit()

    @property
    def is_asked(self) -> bool:
        """Tells whether the run is to end when the step that runs is committed."""
        return self._asked_by is not None

    def listen(self, patches: Patches) -> None:
        """Puts handlers where nobody else has one, from the thread that alone is told of signals."""
        global _present
        if threading.current_thread() is not threading.main_thread() or _present is not None:
            return
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # an event loop's, which has handlers of its own
            signal.set_wakeup_fd(before)
            return
        read, write = self._pipe = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, self._hear)
        _present, self._begin = self, time.monotonic()
        patches.add("signal handler", "SIGTERM and SIGINT", self.let_go)
        threading.Thread(target=self._attend, args=(read,), name="memwall-ending", daemon=True).start()
        _let_go_in_children()

    def let_go(self) -> None:
        """Puts back what was there. Safe to call twice."""
        global _present
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, default)
        self._has_ended.set()
        os.close(self._pipe[1])  # which ends the thread
        _present = self._pipe = None

    def step_begins(self, commit_seconds: float) -> None:
        """Hears that a step begins, and how long a commit takes; the step before took until now."""
        now = time.monotonic()
        self._step_seconds, self._begin, self._commit_seconds = now - self._begin, now, commit_seconds

    def end(self) -> NoReturn:
        """Ends the run in the way of the signal."""
        global _ended
        assert self._asked_by is not None
        self._has_ended.set()
        _ended = self if self._asked_by == signal.SIGTERM else None
        raise KeyboardInterrupt if self._asked_by == signal.SIGINT else SystemExit(128 + self._asked_by)

    def hurry(self) -> None:
        """Ends the process soon, whatever Python still does."""
        left = max(_LEAST_SECONDS, self._told_at + _MOST_SECONDS - time.monotonic())
        with log_to_standard_error():
            _log.warning("SIGTERM: the run has ended; Python's own end is cut short after %.1f s", left)
        for stream in (sys.stdout, sys.stderr):  # Python would do so later
            with suppress(Exception):
                stream.flush()
        exit_in(left, 128 + signal.SIGTERM)

    def _hear(self, number: int, _: Any) -> None:
        name, is_first, self._asked_by = signal.Signals(number).name, not self.is_asked, number
        self._told_at = self._told_at or time.monotonic()
        more_seconds = max(0.0, self._begin + self._step_seconds - time.monotonic()) + self._commit_seconds
        if is_first and more_seconds <= _PATIENCE_SECONDS:
            _log.warning("%s: the run ends when the step that runs is committed; the next one ends it at once", name)
            return
        seconds = f"{more_seconds if is_first else _PATIENCE_SECONDS:.0f} s"
        why = f"the step that runs takes about {seconds} more" if is_first else f"asked again, or not done in {seconds}"
        _log.warning("%s: %s; the run ends at the last committed step", name, why)
        self.end()

    def _attend(self, read: int) -> None:
        """Ends what does not end by itself, from its thread."""
        main = threading.main_thread().ident
        assert main is not None
        while heard := os.read(read, 1):
            number = heard[0]
            if signal.getsignal(number) != self._hear:
                continue
            self._told_at = self._told_at or time.monotonic()
            if self._has_ended.wait(_PATIENCE_SECONDS):
                continue
            signal.pthread_kill(main, number)
            if not self._has_ended.wait(_LAST_SECONDS) and number == signal.SIGTERM:
                _log.warning("SIGTERM: one operation has run all the time; the run ends at the last committed step")
                os._exit(128 + number)
        os.close(read)


@cache
def _let_go_in_children() -> None:
    """Has forked processes, as a data loader's workers, hear signals as they would without memwall."""

    def let_go() -> None:
        if _present is not None:
            _present._has_ended = threading.Event()  # the thread may have held its lock
            _present.let_go()

    os.register_at_fork(after_in_child=let_go)
    reason = "Python has no way to remove it"
    note_permanent("hook", "os.register_at_fork", why="ends a run at a committed step", reason=reason)


def process_is_over() -> None:
    """Hears that nothing but the end of the process follows a run that SIGTERM may have ended."""
    global _is_over
    _is_over = True


@cache
def _look_after_exit() -> None:
    """Has Python's own end cut short after SIGTERM, once all that a script has registered with atexit has run.

    It is called before the script runs, as Python calls first what was registered last.
    """

    def hurry() -> None:
        if _is_over and _ended is not None:
            _ended.hurry()

    atexit.register(hurry)
    reason = "it is there for the end of the process"
    note_permanent("hook", "atexit", why="ends a run soon after SIGTERM", reason=reason)
