"""Writes train.bin and val.bin: the pages of this repository, one byte a token."""

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def prepare(folder):
    """Writes both files into a folder."""
    root = HERE.parents[1]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "LICENSE"]
    text = b"\n".join(page.read_bytes() for page in pages if page.exists())
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    split = int(0.9 * len(tokens))
    tokens[:split].tofile(folder / "train.bin")
    tokens[split:].tofile(folder / "val.bin")


if __name__ == "__main__":
    prepare(HERE)
