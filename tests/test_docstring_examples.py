"""Examples in docstrings print what stands under them."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"memwall": "memwall", "triton_kernels": "memwall.triton_kernels"}
MODULES = [
    ".".join((name, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, name in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
