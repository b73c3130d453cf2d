"""Tells by the first bytes of a file what `explain`, `report` or `diff` was given; puts snapshots into figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.snapshot.analysis import DeviceAnalysis, analyse_device, devices_of
from memwall.report.difference import Source
from memwall.trace.records import Tag

if TYPE_CHECKING:
    from memwall.trace.snapshot.records import Snapshot

_HEAD_BYTES = 64


class SnapshotSummary(Struct, frozen=True, kw_only=True):
    """Holds a CUDA memory snapshot in figures, for scripts; the device that holds most comes first."""

    schema: str = "memwall.snapshot-summary/3"
    tag: Tag = "external"
    devices: tuple[DeviceAnalysis, ...]
    allocator_settings: dict[str, str]


def kind_of(path: Path) -> Literal["trace", "snapshot", "json", "other"]:
    """Tells by its first bytes what a file holds; whether the rest of it is whole, its reader finds out.

    Raises:
        UsageError: the file cannot be read.
    """
    from memwall.trace.file import MAGIC
    from memwall.trace.snapshot.restricted_pickle import is_pickle

    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if head.startswith(MAGIC):
        return "trace"
    if is_pickle(head):
        return "snapshot"
    return "json" if head.lstrip().startswith(b"{") else "other"


def source_kind(path: Path, *, expected: str) -> Source:
    """Tells what a file is, a plan from a run report by its schema.

    Args:
        expected: what an error says was asked for.

    Raises:
        UsageError: the file cannot be read, or is something else.
    """
    kind = kind_of(path)
    if kind in ("trace", "snapshot"):
        return kind
    if kind != "json":
        raise UsageError(f"{path} is nothing that memwall can report on; expected {expected}")
    import msgspec

    from memwall.versioned_files import NO_JSON

    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, *NO_JSON) as error:
        raise UsageError(f"{path} is cut short or no JSON ({error}); expected {expected}") from error
    schema = str(found.get("schema")) if isinstance(found, dict) else ""
    if schema.startswith("memwall.run/"):
        return "run"
    if schema.startswith("memwall.plan/"):
        return "plan"
    raise UsageError(f"{path} is neither a plan nor a run report: at $.schema found {schema!r}; expected {expected}")


def snapshot_summary(snapshot: "Snapshot") -> SnapshotSummary:
    """Returns peak, holders and fragmentation of every device."""
    devices = tuple(analyse_device(snapshot, device)[0] for device in devices_of(snapshot))
    return SnapshotSummary(devices=devices, allocator_settings=snapshot.settings)
