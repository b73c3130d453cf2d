"""Python functions as work of a phantom device's streams: each runs when its stream has come to it."""

import ctypes
import itertools
import os
import traceback
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["failures", "finish", "library", "queue"]

failures: dict[str, str] = {}
"""Operations that were not computed, with the reason: what they return holds whatever was there."""

library = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
_numbers = itertools.count(1)
_waiting: dict[int, tuple[str, Callable[[], object]]] = {}
_is_loud = bool(os.environ.get("PHANTOM_VERBOSE"))


def failed(name: str, error: BaseException) -> None:
    """Notes that an operation was not computed; the account of the device counts it."""
    if name not in failures and _is_loud:
        traceback.print_exception(error)
    failures.setdefault(name, f"{type(error).__name__}: {error}")
    library.phantom_count(b"not computed", name.encode())


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    """Runs in whichever thread the work is done, under whatever modes hold there: none of them is to see it."""
    name, work = _waiting.pop(number)
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            work()
    except Exception as error:
        failed(name, error)


def queue(name: str, work: Callable[[], object], device: torch.device) -> None:
    """Queues a function on the current stream of a device."""
    number = next(_numbers)
    _waiting[number] = name, work
    stream = torch.cuda.current_stream(device)
    library.phantom_call(ctypes.c_void_p(stream.cuda_stream), stream.device_index, _run, ctypes.c_void_p(number))


def finish(device: torch.device) -> None:
    """Waits for the current stream of a device."""
    stream = torch.cuda.current_stream(device)
    library.phantom_finish_stream(ctypes.c_void_p(stream.cuda_stream), stream.device_index)
