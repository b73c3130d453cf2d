"""Rules every kernel's source keeps, read from its syntax tree: those whose breach no test on a small machine shows."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "triton_kernels"
SOURCES = sorted(FOLDER.rglob("*.py"))
# Without an interpreter, or wrong in it, or a choice that a forecast could not repeat.
BANNED = {"libdevice", "inline_asm_elementwise", "make_block_ptr", "autotune", "atomic_add"}
# Class indices: the only values that are loaded as integers.
INTEGERS = {"target_ptr"}


def kernels(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "triton.jit" in [ast.unparse(d) for d in node.decorator_list]
    ]


KERNELS = [pytest.param(kernel, id=kernel.name) for path in SOURCES for kernel in kernels(path)]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def converted(tree: ast.AST, dtype: str) -> set[str]:
    """Expressions on which `.to(dtype)` is called at once."""
    return {
        ast.unparse(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and ast.unparse(node.args[0]) == dtype
    }


def test_there_are_kernels_to_look_at() -> None:
    assert {kernel.values[0].name for kernel in KERNELS} >= {"row_loss_kernel", "store_rounded"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_load_becomes_fp32_at_once(kernel: ast.FunctionDef) -> None:
    """The interpreter's arithmetic in bf16 is wrong without an error."""
    loads = {ast.unparse(call) for call in calls(kernel, "tl.load")}
    integers = {load for load in loads if any(f"load({name} " in load for name in INTEGERS)}
    assert loads - integers <= converted(kernel, "tl.float32")
    assert integers <= converted(kernel, "tl.int64")


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_program_id_is_64_bits_wide(kernel: ast.FunctionDef) -> None:
    """Liger #803, #1335, #1296, #1483; mamba #1015."""
    assert {ast.unparse(call) for call in calls(kernel, "tl.program_id")} <= converted(kernel, "tl.int64")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_nothing_banned_and_no_import_from_outside(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & BANNED
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert "triton_kernels" not in imported
    if not kernels(path):
        assert "triton" not in imported


def test_make_runs_every_test_that_needs_triton_but_no_gpu() -> None:
    """`make test` is without triton, and skips them."""
    root, mark = FOLDER.parent, 'mark.requires("triton")'
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in root.glob("tests/**/test_*.py")}
    marks = {
        name: re.findall(r"^pytestmark = .*$", text, re.MULTILINE)
        for name, text in texts.items()
        if mark in text and name != Path(__file__).relative_to(root).as_posix()
    }
    # A mark of another form would not be found here.
    assert all(mark in "".join(lines) for lines in marks.values())
    needing = {name for name, lines in marks.items() if "mark.gpu" not in "".join(lines)}
    (listed,) = re.findall(r"^KERNEL_TESTS := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert needing == set(listed.split())


@pytest.mark.slow
def test_importing_and_calling_need_no_triton(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('not to be imported')\n")
    code = """
import sys, json, torch
import memwall.triton_kernels as kernels
loss = kernels.linear_cross_entropy(torch.ones(4, 8), torch.ones(32, 8), torch.zeros(4, dtype=torch.long))
found = {"loss": round(float(loss), 4), "triton": "triton" in sys.modules, "cuda": torch.cuda.is_initialized()}
print(json.dumps(found))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"loss": 3.4657, "triton": False, "cuda": False}
