"""DLRover's tuning file, by which its agent and the data loaders of a job tell each other a rank's batch.

The file is one JSON object with a section for data loaders and one for the optimizer, each with a version of its own:
who reads a section acts on it only where its version is above the one that was read last. The agent makes its records
from a section's keys, so that it fails on a key that it does not know and on a section that is missing; and it does not
write the file at once, so that who reads may see a part of it.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from memwall.errors import IntegrationError
from memwall.planning.planfile import Plan
from memwall.versioned_files import NO_JSON, json_bytes

_WAY_OUT = "DLRover may be writing it: try again, or delete the file if no job uses it"


class TunedBatch(Struct, frozen=True, kw_only=True):
    """Holds what DLRover's tuning file says of a rank's batch."""

    batch_size: int
    """Samples of one rank's forward."""
    version: int
    """Version of the section, to be given as `seen_version` when the file is read again."""


class _DataLoader(Struct, kw_only=True):
    version: int = 0
    dataloader_name: str = ""
    last_batch_size: int = 0
    batch_size: int = 0
    num_workers: int = 0
    pin_memory: bool | int = False


class _Optimizer(Struct, kw_only=True):
    version: int = 0
    optimizer_name: str = ""
    learning_rate: float = 0.0
    weight_decay: float = 0.0


_Section = TypeVar("_Section", _DataLoader, _Optimizer)


def tuned_batch(path: str | Path | None = None, *, seen_version: int = 0) -> TunedBatch | None:
    """Returns the batch that DLRover's tuning file asks for; None where it has none that is new.

    A file that is missing or written in part has nothing new: it is to be read again later.

    Args:
        path: the file; by default the one that DLRover names to its workers, `DLROVER_PARAL_CONFIG_PATH`.
        seen_version: the version that was read last; only a higher one is new.

    Raises:
        IntegrationError: the file cannot be read, or holds something else.
    """
    path = _default_path() if path is None else Path(path)
    found = _read(path)
    if found is None:
        return None
    section = _section(path, found, "dataloader", _DataLoader)
    if section.version <= seen_version or section.batch_size < 1:
        return None
    return TunedBatch(batch_size=section.batch_size, version=section.version)


def tuning_file(plan: Plan, path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Returns DLRover's tuning file with the plan's micro-batch, and what is to be said of it.

    What a file that is there says of other things is kept. Sections that are missing are added, keys that the agent
    would fail on are left out.

    Raises:
        IntegrationError: the plan has no batch, or the file that is there is cut short or no tuning file.
    """
    micro_batch, num_micro_batches = plan.batch_parts
    if micro_batch < 1:
        raise IntegrationError("--to dlrover: the plan was made from a step whose batch is unknown: nothing to write")
    found = _read(path) if path.exists() else {}
    if found is None:
        raise IntegrationError(f"{path} is cut short or no JSON; {_WAY_OUT}")
    loader = _section(path, found, "dataloader", _DataLoader)
    loader.last_batch_size, loader.batch_size = loader.batch_size, micro_batch
    loader.version += 1
    sections = {"dataloader": loader, "optimizer": _section(path, found, "optimizer", _Optimizer)}
    left_out = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key in found.get(name) or {}
        if key not in section.__struct_fields__
    ]
    said = ["DLRover writes a file of its own when its agent starts: export again after that, and its workers follow"]
    if num_micro_batches > 1:
        said.append(f"the file has no word for accumulation: {num_micro_batches} of these batches make a step")
    if left_out:
        said.append(f"left out, since DLRover's agent fails on them: {', '.join(left_out)}")
    return json_bytes({"restart": False, **found, **sections}), tuple(said)


def _default_path() -> Path:
    named = os.environ.get("DLROVER_PARAL_CONFIG_PATH")
    return Path(named) if named else Path(tempfile.gettempdir()) / "dlrover" / "auto_paral_config.json"


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the object in the file; None where there is no file, or only a part of one."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrationError(f"cannot read DLRover's tuning file {path}: {error.strerror or error}") from error
    except NO_JSON:
        return None
    if not isinstance(found, dict):
        raise IntegrationError(f"{path} is no tuning file of DLRover: expected one JSON object")
    return found


def _section(path: Path, found: dict[str, Any], name: str, kind: type[_Section]) -> _Section:
    try:
        return msgspec.convert(found.get(name) or {}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise IntegrationError(f"{path} is no tuning file of DLRover: {name}: {error}") from error
