"""Links between nodes, as `plan --ranks` knows them, each figure with its source in `memwall/data/hardware.toml`."""

import difflib
import tomllib
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from memwall.errors import UsageError

__all__ = ["NodeLink", "link_named"]


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
    known = _shipped()
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=4, cutoff=0.5)
    meant = f"closest are {', '.join(near)}" if near else f"known are {', '.join(known)}"
    raise UsageError(f"'{name}' is no link that memwall has figures for; {meant}")


def _shipped() -> dict[str, NodeLink]:
    text = resources.files("memwall").joinpath("data", "hardware.toml").read_text(encoding="utf-8")
    file = tomllib.loads(text)
    return {
        name: msgspec.convert(fields | {"name": name, "source": file["sources"][fields["source"]]}, NodeLink)
        for name, fields in file["links"].items()
    }
