"""The corpus that fuzzing has found: for each reader, the fewest files that reach what all found files reach."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["KEPT", "keep", "kept"]

KEPT = Path(__file__).with_name("corpus.tar.xz")


def kept(reader: str, archive: Path = KEPT) -> list[bytes]:
    """Returns the files that are kept for a reader; none where there is no archive."""
    if not archive.exists():
        return []
    with tarfile.open(archive) as whole:
        members = [member for member in whole if member.name.startswith(f"{reader}/")]
        return [opened.read() for member in members if (opened := whole.extractfile(member)) is not None]


def keep(found: Mapping[str, list[bytes]], readers: tuple[str, ...], archive: Path = KEPT) -> None:
    """Writes the archive anew: with these files for the readers that have some, with those that it had for the rest."""
    files = {reader: found.get(reader) or kept(reader, archive) for reader in readers}
    with tarfile.open(archive, "w:xz") as whole:
        for reader, contents in files.items():
            for number, content in enumerate(sorted(contents)):
                member = tarfile.TarInfo(f"{reader}/{number}")  # no owner and no time: the same files, the same archive
                member.size = len(content)
                whole.addfile(member, io.BytesIO(content))
