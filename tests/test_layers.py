"""No file of the package imports itself in a circle, names for type checkers counted as well."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"memwall": ROOT / "memwall", "memwall.triton_kernels": ROOT / "triton_kernels"}


def module_names() -> dict[str, Path]:
    """Files by what they are imported as."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = module_names()


def statements(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[ast.AST]:
    """What runs when a module is imported, and what stands there for type checkers; not what functions do later."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from statements(ast.iter_child_nodes(node))


def imports_of(name: str) -> set[str]:
    """The package's own modules that one of them names."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            full = {f"{module}.{alias.name}" for alias in node.names}
            found |= {one if one in MODULES else module for one in full}
    return found & MODULES.keys() - {name}


def test_no_file_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
