"""Sends memwall's own log to standard error, for the command line and for whoever sets MEMWALL_LOG.

As a library memwall only logs: it adds no handler by itself, and never one to the root logger, which is the script's.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "MEMWALL_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_OWN = logging.getLogger("memwall")
# transformers sets its level when it is imported, from this variable and to warnings where there is none.
_TRANSFORMERS_LEVEL = "TRANSFORMERS_VERBOSITY"
_LIBRARIES = ("transformers", "huggingface_hub", "accelerate", "torch")


class _StandardError(logging.Handler):
    """Writes to what is standard error at that moment, as a command may have sent it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("memwall: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def tell(text: str) -> None:
    """Says something that a person who runs a script wants to see: as information in the log, or on standard error.

    A script that has set the log of memwall, or one above it, decides there; one that has not sees the line.
    """
    if _OWN.isEnabledFor(logging.INFO) and _OWN.hasHandlers():
        _OWN.info(text)
    elif _OWN.isEnabledFor(logging.WARNING):
        sys.stderr.write(f"memwall: {text}\n")
        sys.stderr.flush()


def level_asked_for() -> int | None:
    """Returns the level that MEMWALL_LOG names; None where it is not set, or names none."""
    return LEVELS.get(os.environ.get(VARIABLE, "").strip().lower())


def follow_environment() -> None:
    """Shows memwall's log where MEMWALL_LOG asks for it, until the process ends; a name that is no level says so."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    if not any(isinstance(handler, _StandardError) for handler in _OWN.handlers):
        _OWN.addHandler(_StandardError())
    _OWN.propagate = False  # or a script with a handler of its own on the root logger shows each line twice
    level = level_asked_for()
    _OWN.setLevel(logging.WARNING if level is None else level)
    if level is None:
        _OWN.warning("%s=%s is no level; expected one of %s; warnings are shown", VARIABLE, text, ", ".join(LEVELS))


@contextmanager
def log_to_standard_error() -> Iterator[None]:
    """Shows memwall's warnings, or what MEMWALL_LOG asks for, on standard error within the block."""
    before = _OWN.level, _OWN.propagate
    has_handler = any(isinstance(handler, _StandardError) for handler in _OWN.handlers)
    handler = _StandardError()
    if not has_handler:
        _OWN.addHandler(handler)
    _OWN.propagate = False
    _OWN.setLevel(level_asked_for() or logging.WARNING)
    try:
        yield
    finally:
        _OWN.removeHandler(handler)
        _OWN.setLevel(before[0])
        _OWN.propagate = before[1]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps other libraries' warnings off a command's output within the block; their errors stay."""
    levels = {name: logging.getLogger(name).level for name in _LIBRARIES}
    variable = os.environ.get(_TRANSFORMERS_LEVEL)
    os.environ.setdefault(_TRANSFORMERS_LEVEL, "error")
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if variable is None:
            os.environ.pop(_TRANSFORMERS_LEVEL, None)
