"""No private name of torch, transformers or accelerate stands outside memwall/torch_internals/.

A name is private where a component of it begins with one underscore. It is found in a file as

- an import of such a module, or of such a name from a module (`from torch._C import ...`, `from torch.x import _y`);
- a chain of attributes from such a library (`torch._C.x`), also by a name that was given to a part of it
  (`aten = torch.ops.aten; aten._softmax`, `from torch import nn; nn.modules.batchnorm._NormBase`);
- a private attribute of an object that is of no class of the file (`tensor._version`, `parallel._has_rebuilt_buckets`),
  or one that is asked for by a string (`getattr(module, "_orig_mod")`);
- a string that is such a path and nothing else (`logging.getLogger("torch._x")`).

Undocumented modules that have public names count as private too. Others' names that do no harm are listed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOOR = ROOT / "memwall" / "torch_internals"
FILES = sorted(path for folder in ("memwall", "triton_kernels") for path in (ROOT / folder).rglob("*.py"))
LIBRARIES = ("torch", "transformers", "accelerate")
UNDOCUMENTED = (
    "torch.fx.experimental",
    "torch.testing",
    "torch.utils.flop_counter",
    "torch.utils.weak",
    "torch.multiprocessing.reductions",
)
ASKING = ("getattr", "hasattr", "setattr", "delattr")
NAMED_TUPLES = {"_replace", "_fields"}
PYTHON_AND_NUMPY = {"_getframe", "_bit_generator", "_target"}
OWN_MARKS = {"_memwall_steps"}
DEEPSPEED = {
    *("_config", "_param_dict", "_get_zero_ckpt_name", "_swappable_optimizer_subgroup"),
    *("_reassign_or_swap_out_partitioned_parameters", "_get_param_swap_info", "_io_aligned_numel"),
}
NOT_OF_THESE = NAMED_TUPLES | PYTHON_AND_NUMPY | OWN_MARKS | DEEPSPEED
PATH = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")


def is_private(path: str) -> bool:
    parts = path.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] in LIBRARIES and (hidden or path.startswith(UNDOCUMENTED))


def is_hidden(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_[a-zA-Z]", name) is not None


def names_bound(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for, where it is a part of a library."""
    bound = {name: name for name in LIBRARIES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound.update((alias.asname, alias.name) for alias in node.names if alias.asname is not None)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            bound.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            path = chain(node.value, bound)
            if path is not None and path.split(".")[0] in LIBRARIES:
                bound.update((target.id, path) for target in targets if isinstance(target, ast.Name))
    return bound


def chain(node: ast.AST, bound: dict[str, str]) -> str | None:
    """The dotted path of a chain of attributes, from what its first name stands for; None if it has no first name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([bound.get(node.id, node.id), *reversed(parts)]) if isinstance(node, ast.Name) else None


def own_names(tree: ast.AST) -> set[str]:
    """Private names that the classes of a file give their objects."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for member in ast.walk(node):
                if isinstance(member, ast.FunctionDef):
                    own.add(member.name)
                elif isinstance(member, ast.AnnAssign | ast.Assign):
                    targets = member.targets if isinstance(member, ast.Assign) else [member.target]
                    for target in targets:
                        own |= {part.attr for part in ast.walk(target) if isinstance(part, ast.Attribute)}
                        own |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return own


def found_in(code: str) -> list[str]:
    """The private names that a file uses, each with its line."""
    tree = ast.parse(code)
    bound, own = names_bound(tree), own_names(tree) | NOT_OF_THESE

    def found() -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                paths = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from ((node.lineno, path) for path in paths if is_private(path))
            elif isinstance(node, ast.Attribute):
                path = chain(node, bound)
                is_own = path is not None and (
                    path.startswith(("self.", "cls.")) or path.partition(".")[0] in sys.stdlib_module_names
                )
                if path is not None and is_private(path):
                    yield node.lineno, path
                elif is_hidden(node.attr) and node.attr not in own and not is_own:
                    yield node.lineno, node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
                asked = node.args[1] if len(node.args) > 1 else None
                if isinstance(asked, ast.Constant) and is_hidden(asked.value) and asked.value not in own:
                    yield node.lineno, str(asked.value)
            elif isinstance(node, ast.Constant) and PATH.fullmatch(str(node.value)) and is_private(str(node.value)):
                yield node.lineno, str(node.value)

    return [f"{line}: {name}" for line, name in sorted(set(found()))]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch._C.x()", "torch._C.x"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import x", "torch._C.x"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.autograd.graph import _x", "torch.autograd.graph._x"),
        ("from torch.utils.weak import WeakIdRef", "torch.utils.weak.WeakIdRef"),
        ("import torch\naten = torch.ops.aten\naten._softmax", "torch.ops.aten._softmax"),
        ("from torch import nn\nnn.modules.batchnorm._NormBase", "torch.nn.modules.batchnorm._NormBase"),
        ("import torch.nn.functional as F\nF._x()", "torch.nn.functional._x"),
        ("def f(value): return value.parameter._version", "_version"),
        ("def f(value): return getattr(value, '_orig_mod')", "_orig_mod"),
        ("def f(parallel): return parallel._has_rebuilt_buckets", "_has_rebuilt_buckets"),
        ("def f(value): return hasattr(value, '_nowhere_in_torch')", "_nowhere_in_torch"),
        ("import logging\nlogging.getLogger('torch._dynamo')", "torch._dynamo"),
    ],
)
def test_each_form_of_a_private_name_is_found(code: str, name: str) -> None:
    assert [found.partition(": ")[2] for found in found_in(code)][-1] == name


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.ops.aten.add.Tensor.__name__",
        "class A:\n    def __init__(self): self._version = 1\n    def f(self, other): return other._version",
        "class A:\n    def f(self): return self._base",
        "x = 'torch._C says'",
        "import os\nos._exit(1)",
    ],
)
def test_own_and_public_names_are_not(code: str) -> None:
    assert found_in(code) == []


@pytest.mark.slow
def test_private_names_stand_behind_the_door_alone() -> None:
    outside = {
        str(path.relative_to(ROOT)): found
        for path in FILES
        if DOOR not in path.parents and (found := found_in(path.read_text()))
    }
    assert outside == {}
