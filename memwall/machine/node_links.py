"""Links between nodes, as `plan --ranks` knows them, each figure with its source in `memwall/data/hardware.toml`."""

import tomllib
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from memwall.machine.hardware import entry_named


class NodeLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes what connects a node to others."""

    name: str
    """The name that `--link` takes, e.g. `infiniband-ndr`."""
    product: str
    bytes_per_second: Annotated[float, Meta(gt=0)]
    """All adapters of a node together, in one direction, at their peak."""
    source: str


def link_named(name: str) -> NodeLink:
    """Returns the link of that name.

    Raises:
        UsageError: there is none; the message offers the closest names.
    """
    return entry_named(name, _shipped(), "link")


def _shipped() -> dict[str, NodeLink]:
    text = resources.files("memwall").joinpath("data", "hardware.toml").read_text(encoding="utf-8")
    file = tomllib.loads(text)
    return {
        name: msgspec.convert(fields | {"name": name, "source": file["sources"][fields["source"]]}, NodeLink)
        for name, fields in file["links"].items()
    }
