"""A JSON file beside a memory snapshot, with what that does not say: phases, settings, release, what was lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from memwall.errors import UsageError
from memwall.trace.tags import Tag
from memwall.versioned_files import NO_JSON

__all__ = ["Marks", "TimedCall", "TimedPhase", "load_marks_beside", "marks_path"]

_SETTER, _LIMIT = "_set_allocator_settings", "set_per_process_memory_fraction"


class TimedPhase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says where a phase begins."""

    name: str
    time_us: int
    """Microseconds since 1970, as torch notes them in its events."""


class TimedCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notes a call that changes the allocator's cache, settings or limit; a snapshot has no event for it."""

    name: str
    arguments: str
    time_us: int


class Marks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds everything around one snapshot."""

    schema: Literal["memwall.marks/1"] = "memwall.marks/1"
    tag: Tag = "gpu-measured"
    snapshot: str
    """Name of the file beside which it lies."""
    reason: Literal["out-of-memory", "end"]
    time_us: int
    torch_version: str
    device: str
    settings: str
    """The allocator's settings that torch took last."""
    environment: dict[str, str]
    total_bytes: int
    """Bytes of the device."""
    free_bytes: int
    requested_bytes: int | None
    """The bytes that could not be had; None where memory did not run out."""
    max_entries: int
    """Room of the ring buffer of each device."""
    num_entries: int
    """Events of the device that has most."""
    wrapped: bool
    """Whether the buffer is full: the beginning is overwritten then."""
    allocated_before_bytes: int
    """Bytes that were allocated before the recording began, and so have no stack."""
    phases: tuple[TimedPhase, ...]
    calls: tuple[TimedCall, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what the reader of the snapshot's figures must know."""
        found = []
        if self.wrapped:
            found.append(
                f"the buffer of {self.max_entries} events is full: what came before the first of them was overwritten"
            )
        if self.allocated_before_bytes:
            found.append(
                f"the recording began too late: {self.allocated_before_bytes} bytes were allocated before it; begin it "
                "before the model is built"
            )
        emptied = sum(call.name == "empty_cache" for call in self.calls)
        if emptied:
            found.append(f"the program emptied the cache; calls: {emptied}")
        limits = [call for call in self.calls if call.name == _LIMIT]
        if limits:
            found.append(f"the program limited its memory, and no comparison of settings does: {_shown(limits)}")
        return tuple(found)

    def changed_after(self, begin_us: int) -> str:
        """Returns why a history was not recorded under one setting and one limit; "" if nothing says so.

        Args:
            begin_us: time of its first event; 0 if it has none.
        """
        changed = [call for call in self.calls if call.name in (_SETTER, _LIMIT) and call.time_us > begin_us]
        return f"they were changed while it was recorded: {_shown(changed)}" if changed else ""


def _shown(calls: Sequence[TimedCall]) -> str:
    return ", ".join(f"{call.name}({call.arguments})" for call in calls)


def marks_path(snapshot: Path) -> Path:
    """Returns where the marks of a snapshot are."""
    return snapshot.with_name(f"{snapshot.stem}.marks.json")


def load_marks_beside(snapshot: Path) -> Marks | None:
    """Returns the marks of a snapshot; None where nobody wrote any.

    Raises:
        UsageError: there is a file with their name, and it holds none.
    """
    path = marks_path(snapshot)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Marks)
    except (OSError, *NO_JSON) as error:
        raise UsageError(
            f"{path} lies beside the snapshot and does not hold its marks: {error}; move it away or record again"
        ) from error
