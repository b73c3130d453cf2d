"""The package as a whole: what importing it does, what it exports, what is installed, how large its files are."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from combinations import exhaustive

import memwall
from memwall import errors, integrations

ROOT = Path(__file__).parent.parent
MODULES = sorted([*ROOT.glob("memwall/**/*.py"), *ROOT.glob("triton_kernels/**/*.py")])
MAX_LINES = 600
RIM = ("cli", "demo", "report", "integrations")
PUBLIC_NAMES = [
    "ApplyError",
    "InfeasibleError",
    "IntegrationError",
    "MemwallError",
    "NoEffectError",
    "NotAvailableError",
    "NotExactError",
    "OffloadIOError",
    "OutOfMemoryError",
    "Plan",
    "PlanError",
    "RankError",
    "RowEmbedding",
    "RowEmbeddingBag",
    "Session",
    "StoreError",
    "Trace",
    "TraceError",
    "UsageError",
    "Workload",
    "__version__",
    "estimate",
    "fit",
    "import_checkpoint",
    "plan",
    "record",
    "resumed_steps",
    "shard",
    "steps",
]
INSPECT_IMPORT = """
import json, logging, os, sys, warnings
before = dict(os.environ), list(logging.root.handlers), list(warnings.filters), set(sys.modules)
import memwall
after = dict(os.environ), list(logging.root.handlers), list(warnings.filters)
print(json.dumps({
    "same": [a == b for a, b in zip(before, after)],
    "loggers": [n for n, l in logging.root.manager.loggerDict.items() if getattr(l, "handlers", None)],
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - before[3]} - sys.stdlib_module_names),
}))
"""


def run_python(code: str) -> str:
    """Standard output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_changes_nothing_and_reads_no_other_library() -> None:
    found = json.loads(run_python(INSPECT_IMPORT))
    assert found == {"same": [True, True, True], "loggers": [], "loaded": ["memwall"]}


@pytest.mark.slow
def test_public_names_start_no_device_and_load_no_optional_library() -> None:
    # torch imports an installed triton by itself and goes on where that fails; memwall's own import would not.
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import memwall\n"
        "for name in memwall.__all__: getattr(memwall, name)\n"
        "import torch\n"
        "optional = {'triton', 'transformers', 'accelerate', 'deepspeed', 'plotly', 'jinja2', 'rich', 'typer'}\n"
        "print(sorted(n for n in optional if sys.modules.get(n)), torch.cuda.is_initialized())"
    )
    assert run_python(code).split("\n")[-2] == "[] False"


def test_public_names_are_pinned() -> None:
    assert memwall.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(memwall, name)
    assert isinstance(value, str) or (value.__doc__ or "").strip()


def test_every_error_that_is_raised_on_purpose_can_be_caught_by_a_public_name() -> None:
    """All of them, but for the one that is only told apart inside: it is a `TraceError`."""
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    found = {value.__name__ for value in classes if value.__module__ == errors.__name__}
    assert found - {"NeedsValuesError"} == {name for name in PUBLIC_NAMES if name.endswith("Error")}
    assert issubclass(errors.NeedsValuesError, memwall.TraceError)


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_point_no_deeper_than_the_public_names(page: Path) -> None:
    """What people are told to import is `memwall.X`, or `memwall.integrations.X` and `memwall.triton_kernels`.

    Schemas of files, as `memwall.plan/2`, and the trace's name by default are no names of Python.
    """
    text = re.sub(r"`[^`]*memwall\.\w+/\d[^`]*`|`memwall\.trace`", "", page.read_text())
    for name in re.findall(r"(?<![\w./-])memwall\.([\w.]*\w)", text):
        first, *rest = name.split(".")
        if first == "integrations":
            assert not rest or rest in [[public] for public in integrations.__all__], name
        elif first == "triton_kernels":
            importlib.import_module(f"memwall.{'.'.join([first, *rest[:1]])}")
        else:
            assert first in PUBLIC_NAMES, name
            assert not rest or first in ("plan", "Plan"), name


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = memwall.Wrokload
    assert str(raised.value) == (
        f"module 'memwall' has no attribute 'Wrokload'; public names: {', '.join(PUBLIC_NAMES)}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [exhaustive("memwall"), "memwall.planning", exhaustive("memwall.planning.solver.instance")]
)
def test_plan_is_the_verb_whichever_import_came_first(first: str) -> None:
    code = f"import memwall, {first}; from memwall import plan; print(callable(memwall.plan), plan is memwall.plan)"
    assert run_python(code) == "True True\n"


def test_listed_packages_are_the_folders() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    sources = {
        ROOT / name.replace("memwall.triton_kernels", "triton_kernels").replace(".", "/") for name in setup["packages"]
    }
    assert sources == {path.parent for path in MODULES}
    assert [folder for folder in sources if not (folder / "__init__.py").exists()] == []


def test_entry_point_is_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["memwall"].split(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_wheel_installs_memwall_only(tmp_path: Path) -> None:
    # A copy: setuptools leaves build/ behind, from where removed files would come back into a later wheel.
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "memwall",
        "triton_kernels",
        "recipes",
        "tests",
        "benchmarks",
    ):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tmp_path / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("torch_memwall-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("memwall/**/*.py")}
    expected |= {f"memwall/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("triton_kernels/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert check_wheel(wheel).returncode == 0
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    told = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE", "Author: The memwall authors"} <= set(told)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_projects_own_files_are_there_and_lead_to_each_other() -> None:
    """GIVEN a link in a page WHEN it names a file THEN that is in the repository."""
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    for name in ("README", "CHANGELOG", "SECURITY", "CONTRIBUTING"):
        page = (ROOT / f"{name}.md").read_text()
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
        assert [link for link in links if link and not (ROOT / link).exists()] == []
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_wheel_check_names_what_is_wrong(tmp_path: Path) -> None:
    wheel = tmp_path / "torch_memwall-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("memwall/__init__.py", "memwall/cli/app.py", "memwall/py.typed", "triton_kernels/__init__.py"):
            archive.writestr(name, "")
    done = check_wheel(wheel)
    assert done.returncode == 1
    faults = [line.removeprefix(f"{wheel}: ") for line in done.stderr.splitlines()]
    assert "memwall/triton_kernels/__init__.py is missing" in faults
    assert "top-level triton_kernels would be installed" in faults


def check_wheel(wheel: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / ".ci/check_wheel.py"), str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_modules_are_small_typed_and_silent() -> None:
    found = []
    for path in MODULES:
        text, name = path.read_text(), path.relative_to(ROOT)
        nodes = list(ast.walk(ast.parse(text)))
        if len(text.splitlines()) > MAX_LINES:
            found.append(f"{name} has more than {MAX_LINES} lines")
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [f"{name}: {node.name} says not what it returns" for node in functions if node.returns is None]
        if name.parts[1] not in RIM:
            calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
            found += [f"{name}:{node.lineno} prints" for node in calls if node.func.id == "print"]
    assert found == []
