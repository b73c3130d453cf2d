"""What a file given to `explain` or `report` is, told by its first bytes, and a snapshot in figures."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.snapshot_analysis import DeviceAnalysis, analyse_device, devices_of
from memwall.predict.snapshot_settings import with_settings

if TYPE_CHECKING:
    from memwall.trace.snapshot_records import Snapshot

__all__ = ["SnapshotSummary", "kind_of", "snapshot_summary"]

_HEAD_BYTES = 64


class SnapshotSummary(Struct, frozen=True, kw_only=True):
    """A CUDA memory snapshot in figures, for scripts; the device that holds most comes first."""

    schema: str = "memwall.snapshot-summary/1"
    devices: tuple[DeviceAnalysis, ...]
    allocator_settings: dict[str, str]


def kind_of(path: Path) -> Literal["trace", "snapshot", "json", "other"]:
    """What a file holds, by its first bytes; whether the rest of it is whole, its reader finds out.

    Raises:
        UsageError: the file cannot be read.
    """
    from memwall.trace.file import MAGIC
    from memwall.trace.snapshot_pickle import is_pickle

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


def snapshot_summary(snapshot: "Snapshot") -> SnapshotSummary:
    """Peak, holders, fragmentation and the best allocator settings of every device."""
    # A snapshot does not say which torch wrote it; the one at hand is the likeliest.
    torch_version = version("torch")
    return SnapshotSummary(
        devices=tuple(
            with_settings(analyse_device(snapshot, device)[0], snapshot, torch_version)
            for device in devices_of(snapshot)
        ),
        allocator_settings=snapshot.settings,
    )
