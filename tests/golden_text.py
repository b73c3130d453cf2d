"""Text as a terminal of a given width shows it, and the files it is compared with."""

import io
from pathlib import Path

from rich.console import Console, RenderableType

GOLDEN = Path(__file__).parent / "report" / "golden"


def drawn(renderable: RenderableType, width: int = 80) -> list[str]:
    """Lines as printed, without the blanks that fill them up to the width."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def golden(name: str) -> list[str]:
    return (GOLDEN / name).read_text(encoding="utf-8").splitlines()
