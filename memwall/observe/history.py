"""Records what the CUDA caching allocator does during a run, and writes a snapshot when memory runs out.

The buffer is bounded and stacks are Python's alone, so that a long run may be recorded (torch's documentation of
`_record_memory_history`: about 2 us and some KB per entry). On a machine without CUDA there is no such history: what
can be written there is memwall's own trace of the recorded step.
"""

import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memwall.apply.memory.exhaustion import is_exhaustion
from memwall.errors import NotAvailableError, OutOfMemoryError, StoreError, UsageError
from memwall.observe.history_marks import Marks, TimedCall, TimedPhase, marks_path
from memwall.observe.rank_spread import rank_file_name
from memwall.patches import Patches, note_permanent
from memwall.predict.cuda_allocator.advice import VARIABLES
from memwall.torch_internals.allocator import (
    CHANGING_CALLS,
    attach_out_of_memory_observer,
    record_memory_history,
    settings_in_force,
)
from memwall.torch_internals.allocator import snapshot as snapshot_of_allocator
from memwall.trace.attached import attach_hook
from memwall.trace.file import save_trace
from memwall.trace.records import Trace
from memwall.units import format_bytes
from memwall.versioned_files import whole_file

__all__ = ["DEFAULT_MAX_ENTRIES", "MemoryHistory"]

_log = logging.getLogger(__name__)

DEFAULT_MAX_ENTRIES = 100_000
# A loop that catches the error and goes on would fill the disk.
_MOST_DUMPS = 3
_MOST_MARKS = 10_000


class MemoryHistory:
    """Records one run's history: `begin` before the model is built, `close` when the run has ended."""

    def __init__(
        self, directory: str | Path, *, max_entries: int = DEFAULT_MAX_ENTRIES, is_written_at_end: bool = False
    ) -> None:
        """Makes the folder; nothing is recorded yet.

        Args:
            directory: where snapshots are written; made where it is missing.
            max_entries: events per device that are kept.
            is_written_at_end: also where the run ends well.

        Raises:
            UsageError: the directory is a file, or cannot be made.
        """
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"history: cannot make the folder {directory}: {error.strerror or error}; choose another"
            ) from error
        self.written: list[Path] = []
        self._max_entries = max_entries
        self._is_written_at_end = is_written_at_end
        self._is_recording = False
        self._allocated_before_bytes = 0
        self._phases: deque[TimedPhase] = deque(maxlen=_MOST_MARKS)
        self._calls: deque[TimedCall] = deque(maxlen=_MOST_MARKS)
        self._patches = Patches("records the CUDA allocator's history")

    def begin(self, *, is_step_recorded: bool = False) -> None:
        """Has torch record from here on; to be called before the model is built.

        Args:
            is_step_recorded: a session will record a step, so that without CUDA there is something to write.

        Raises:
            UsageError: there is no CUDA device, and nothing else to write.
        """
        if not torch.cuda.is_available():
            if is_step_recorded:
                return
            raise UsageError(
                "history: torch finds no CUDA device here, and the history is that of its allocator; on a CPU memwall "
                "can write the trace of the step it records, which needs `memwall run --budget SIZE --history DIR`"
            )
        self._allocated_before_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        if self._allocated_before_bytes:
            _log.warning(
                "history: too late to record the beginning: %s are allocated already, and will have no stack; begin "
                "before the model is built",
                format_bytes(self._allocated_before_bytes),
            )
        record_memory_history(enabled="all", context="all", stacks="python", max_entries=self._max_entries)
        self._patches.add("setting", "the allocator's history", lambda: record_memory_history(enabled=None))
        self._is_recording = True
        self.mark("build")
        for name in CHANGING_CALLS:
            self._watch(name)
        _recording.add(self)
        _observe()

    def attach(self, model: nn.Module) -> None:
        """Marks where the phases of this model's steps begin."""
        if not self._is_recording:
            return

        def before_forward(*_: Any) -> None:
            self.mark("forward" if torch.is_grad_enabled() else "eval")

        def after_forward(*_: Any) -> None:
            self.mark("backward" if torch.is_grad_enabled() else "other")

        self._patches.push(attach_hook(model.register_forward_pre_hook, before_forward, prepend=True))
        self._patches.push(attach_hook(model.register_forward_hook, after_forward))
        self._patches.hook(register_optimizer_step_pre_hook, lambda *_: self.mark("optimizer"))
        self._patches.hook(register_optimizer_step_post_hook, lambda *_: self.mark("other"))

    def mark(self, phase: str) -> None:
        """Notes that a phase begins."""
        self._phases.append(TimedPhase(name=phase, time_us=_now_us()))

    def failed(self, error: BaseException, trace: Trace | None) -> None:
        """Writes the recorded step of a script that ended with an error, without CUDA, where nobody else tells.

        Args:
            trace: of the step that was recorded, if there is one.
        """
        is_out_of_memory = isinstance(error, OutOfMemoryError) or is_exhaustion(error)
        if self._is_recording or not is_out_of_memory:
            return
        if trace is None:
            _log.warning(
                "history: memory ran out before a step was recorded; there is nothing to write, give a larger "
                "budget to see a step recorded"
            )
            return
        path = self.directory / rank_file_name("oom.trace")
        save_trace(trace, path)
        self.written.append(path)
        _log.warning("history: memory ran out; the recorded step was written to %s", path)

    def close(self, *, completed: bool = True) -> None:
        """Ends the recording, and writes its end where that was asked for."""
        if not self._is_recording:
            return
        if completed and self._is_written_at_end:
            device = torch.cuda.current_device()
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            self._write("end", device, None, total_bytes, free_bytes)
        self._is_recording = False
        _recording.discard(self)
        self._patches.undo()

    def out_of_memory(self, device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Writes what is in memory when a request has failed, before torch raises the error."""
        if self._is_recording and len(self.written) < _MOST_DUMPS:
            self._write("out-of-memory", device, requested_bytes, total_bytes, free_bytes)

    def _write(
        self,
        reason: Literal["out-of-memory", "end"],
        device: int,
        requested_bytes: int | None,
        total_bytes: int,
        free_bytes: int,
    ) -> None:
        """Writes a snapshot and its marks; logs what goes wrong, for the error of the run is the one that matters."""
        name = "end.pickle" if reason == "end" else f"oom-{len(self.written) + 1}.pickle"
        path = self.directory / rank_file_name(name)
        time_us = _now_us()
        try:
            snapshot = snapshot_of_allocator()
            num_entries = max((len(events) for events in snapshot["device_traces"]), default=0)
            marks = Marks(
                snapshot=path.name,
                reason=reason,
                time_us=time_us,
                torch_version=str(torch.__version__),
                device=torch.cuda.get_device_name(device),
                settings=settings_in_force() or "",
                environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
                total_bytes=total_bytes,
                free_bytes=free_bytes,
                requested_bytes=requested_bytes,
                max_entries=self._max_entries,
                num_entries=num_entries,
                wrapped=num_entries >= self._max_entries,
                allocated_before_bytes=self._allocated_before_bytes,
                phases=tuple(self._phases),
                calls=tuple(self._calls),
            )
            with whole_file(path, noun="snapshot", error=StoreError) as file:
                pickle.dump(snapshot, file)
                marks_path(path).write_bytes(msgspec.json.format(msgspec.json.encode(marks), indent=2) + b"\n")
        except (StoreError, RuntimeError, NotAvailableError) as error:
            marks_path(path).unlink(missing_ok=True)
            _log.warning(
                "history: the snapshot could not be written to %s: %s; free space there, or give another folder",
                path,
                error.__cause__ or error,
            )
            return
        self.written.append(path)
        notes = "".join(f"; {note}" for note in marks.notes)
        _log.warning("history: wrote %s (%s); `memwall explain %s` says who held it%s", path, reason, path, notes)

    def _watch(self, name: str) -> None:
        """Notes the calls of a function of torch.cuda that the allocator records no event for."""
        for module in (torch.cuda.memory, torch.cuda):
            if getattr(module, name, None) is not None:
                self._patches.wrap(module, name, partial(self._noted, name))

    def _noted(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shown = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        self._calls.append(TimedCall(name=name, arguments=shown, time_us=_now_us()))
        return original(*args, **kwargs)


_recording: set[MemoryHistory] = set()
_is_observing = False


def _observe() -> None:
    """Has torch tell those that record when a request fails: one observer for the life of the process."""
    global _is_observing
    if not _is_observing:
        if not attach_out_of_memory_observer(_tell):
            _log.warning(
                "history: a snapshot at the moment when memory runs out is not available with torch %s; one is written "
                "at the end of a run that ends well, if that was asked for",
                torch.__version__,
            )
            return
        _is_observing = True
        note_permanent(
            "observer",
            "the out-of-memory observer of the CUDA allocator",
            why="writes the CUDA allocator's history when memory runs out",
            reason="torch has no way to take an observer away; it does nothing while no history is recorded",
        )


def _tell(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    for history in tuple(_recording):
        history.out_of_memory(device, requested_bytes, total_bytes, free_bytes)


def _now_us() -> int:
    return time.time_ns() // 1000
