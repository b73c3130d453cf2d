"""Sizes that are printed are binary, all of them: nobody should have to ask which of two units a figure has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import memwall

PACKAGE = Path(memwall.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted(PACKAGE.rglob("*.j2"))
# A unit on its own, as it follows a figure. Names of devices (H100 80GB) and sizes to type (24GB) have none.
DECIMAL = re.compile(r"(?:^|[\s}(])[kKMGTP]B\b")


def printed_texts(source: str) -> Iterator[str]:
    """String constants of a module, docstrings apart; the parts of an f-string each on its own."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_printed_has_a_decimal_unit(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    texts = printed_texts(source) if path.suffix == ".py" else [source]
    if path.name in ("units.py", "limits.py"):  # these read such sizes: of users, and of /proc/meminfo
        return
    assert [text for text in texts if DECIMAL.search(text)] == []


@pytest.mark.parametrize(("text", "is_found"), [("{x} GB", True), (" MB/s", True), ("24GB", False), ("3 GiB", False)])
def test_the_pattern_finds_units_and_no_names(text: str, is_found: bool) -> None:
    assert bool(DECIMAL.search(text)) == is_found
