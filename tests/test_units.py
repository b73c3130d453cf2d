"""Sizes that are printed are binary, all of them: nobody should have to ask which of two units a figure has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import memwall
from memwall.units import format_bytes, parse_size

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


def test_nothing_that_is_printed_has_a_decimal_unit() -> None:
    found = []
    for path in SOURCES:
        if path.name in ("units.py", "limits.py"):  # these read such sizes: of users, and of /proc/meminfo
            continue
        source = path.read_text(encoding="utf-8")
        texts = printed_texts(source) if path.suffix == ".py" else [source]
        found += [f"{path.relative_to(PACKAGE)}: {text}" for text in texts if DECIMAL.search(text)]
    assert found == []


@pytest.mark.parametrize(("text", "is_found"), [("{x} GB", True), (" MB/s", True), ("24GB", False), ("3 GiB", False)])
def test_the_pattern_finds_units_and_no_names(text: str, is_found: bool) -> None:
    assert bool(DECIMAL.search(text)) == is_found


class TestRounding:
    """A size that is needed is read back by the next run; one that is there must be there."""

    @pytest.mark.parametrize("num_bytes", [1, 1023, 1025, (1 << 20) - 1, 564_930_807, 25_929_534_017, 3 << 50])
    @pytest.mark.parametrize("scale", [1, 3, 1000])
    def test_up_and_down_are_on_their_sides(self, num_bytes: int, scale: int) -> None:
        size = num_bytes * scale
        down = parse_size(format_bytes(size, rounding="down"))
        assert down <= size <= parse_size(format_bytes(size, rounding="up"))

    @pytest.mark.parametrize("text", ["1.0 KiB", "538.8 MiB", "512.5 MiB", "24.15 GiB", "1.00 PiB", "17 B"])
    def test_what_was_shown_is_shown_again(self, text: str) -> None:
        assert format_bytes(parse_size(text), rounding="up") == text

    def test_what_is_less_keeps_its_sign(self) -> None:
        assert format_bytes(-1025, rounding="up") == "-1.1 KiB"
        assert format_bytes(-1025, rounding="down") == "-1.0 KiB"
