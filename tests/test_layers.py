"""No file imports itself in a circle, nor a folder of `apply`, not for type checkers either; class names are unique."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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


def circle_in(graph: Mapping[str, set[str]]) -> str:
    """A way from one of the names back to itself; "" where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def test_no_file_imports_itself_in_a_circle() -> None:
    assert circle_in({name: imports_of(name) for name in MODULES}) == ""


def test_no_folder_of_apply_imports_itself_in_a_circle() -> None:
    """Techniques register themselves, so that what finds them need not import them."""
    folders: dict[str, set[str]] = {}
    for name in (name for name in MODULES if name.startswith("memwall.apply.")):
        folder = folder_of(name)
        folders.setdefault(folder, set()).update({folder_of(other) for other in imports_of(name)} - {folder})
    assert {f"memwall.apply{sub}" for sub in ("", ".techniques", ".streaming")} < folders.keys()
    assert circle_in(folders) == ""


def folder_of(name: str) -> str:
    """As a package."""
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def test_no_two_classes_share_a_name() -> None:
    """But for those that a file keeps for itself."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
