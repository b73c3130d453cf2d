"""Devices that are not at hand, as `estimate` and `plan --device` know them, each figure with its source.

The figures stand in `memwall/data/hardware.toml`. They are peaks from data sheets: an upper bound for speed, never a
measurement. What the driver keeps for itself is already taken off `usable_bytes`; what a process needs beside its
tensors (`context_bytes`) is a range, because published figures differ tenfold: measure it where there is a device.
"""

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from memwall.errors import UsageError

Dtype = Literal["float32", "tf32", "bfloat16", "float16", "float8"]
_Bytes = Annotated[int, Meta(gt=0)]
_Rate = Annotated[float, Meta(gt=0)]
_Entry = TypeVar("_Entry")


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a training device."""

    name: str
    """The name that `--device` takes, e.g. `h100-80gb`."""
    product: str
    usable_bytes: _Bytes
    """All a process can see of the memory, its own context included: `total_memory` of torch's device properties."""
    memory_bytes_per_second: _Rate
    flops: dict[Dtype, _Rate]
    """Dense FLOP/s by dtype, accumulated in fp32; `tf32` is fp32 input on matrix units. A missing dtype has no unit."""
    compute_capability: Annotated[str, Meta(pattern=r"^\d+\.\d$")]
    num_multiprocessors: Annotated[int, Meta(gt=0)]
    """Streaming multiprocessors of NVIDIA, compute units of AMD: `multi_processor_count` of torch's properties."""
    max_threads_per_multiprocessor: Annotated[int, Meta(gt=0)] | None = None
    """Threads resident on each at once, by the compute capability; None where the file has no such capability."""
    l2_cache_bytes: _Bytes
    """Bytes of the L2 cache in torch's device properties; on AMD those of one die."""
    host_link_bytes_per_second: _Rate
    """Between device and host, in one direction."""
    peer_link_bytes_per_second: _Rate | None = None
    """All links to other devices together, in one direction; None where there is only PCIe."""
    context_bytes: tuple[_Bytes, _Bytes]
    """The smallest and the largest published figure for what a process holds beside the allocator's memory."""
    communicator_bytes: tuple[_Bytes, _Bytes]
    """The smallest and the largest figure for what a communicator of NCCL or RCCL holds on each rank, beside that."""
    sources: dict[str, str]
    """The place where each figure was read, by the name of its field."""


def hardware_named(name: str) -> Hardware:
    """Returns the device of that name.

    Raises:
        UsageError: there is none; the message offers the closest names.
    """
    return entry_named(name, _shipped(), "device")


def entry_named(name: str, known: Mapping[str, _Entry], noun: str) -> _Entry:
    """Returns the entry of that name, however it is spelled.

    Args:
        noun: says what entries are, for the message.

    Raises:
        UsageError: there is none; the message offers the closest names.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in known:
        return known[wanted]
    # `h100` alone is no close match of `h100-pcie-80gb` for difflib, but plainly meant.
    starting = [other for other in known if wanted and other.startswith(wanted)]
    near = starting or difflib.get_close_matches(wanted, known, n=4, cutoff=0.5)
    meant = f"closest are {', '.join(near)}" if near else f"known are {', '.join(known)}"
    raise UsageError(f"'{name}' is no {noun} that memwall has figures for; {meant}")


def hardware_of_device(name: str) -> Hardware:
    """Returns the entry for a device as CUDA names it, "NVIDIA A100-SXM4-80GB".

    Raises:
        UsageError: there is none.
    """
    words = name.lower().replace("-", " ").split()
    fitting = [known for known in _shipped() if all(part in words for part in known.split("-"))]
    if not fitting:
        raise UsageError(f"'{name}' is in no entry of hardware.toml; name the nearest one with --device")
    return _shipped()[max(fitting, key=len)]


@cache
def _shipped() -> dict[str, Hardware]:
    text = resources.files("memwall").joinpath("data", "hardware.toml").read_text(encoding="utf-8")
    file = tomllib.loads(text)
    return {name: _device(name, fields, file) for name, fields in file["devices"].items()}


def _device(name: str, fields: dict[str, Any], file: dict[str, Any]) -> Hardware:
    """Returns a device as the file has it, with its sources spelled out and what its compute capability says of it."""
    spelled = {figure: file["sources"][key] for figure, key in fields["sources"].items()}
    capability = file["capabilities"].get(fields["compute_capability"], {})
    threads = capability.get("max_threads_per_multiprocessor")
    added = {"name": name, "sources": spelled, "max_threads_per_multiprocessor": threads}
    return msgspec.convert(fields | added, Hardware)
