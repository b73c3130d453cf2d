"""Each recipe has its parts; the commands that it prints are run, and train the weights of the plain script.

One that needs only torch is tested with the others; all of them by `make test-recipes`.
"""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/README.md"))
PAGE = ROOT / "docs" / "recipes.md"
CHEAP = ("nanogpt-docs",)
NOT_MEASURED = "Bytes and seconds have not been measured yet."
USES_MEMWALL = ("recommender",)
"""Their subject is what memwall has in Python."""


def commands(recipe: Path) -> list[list[str]]:
    """The commands under "Run", one a line; a line that ends in a backslash goes on."""
    block = re.search(r"## Run\n\n```\n(.*?)```", (recipe / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None, recipe.name
    return [shlex.split(line) for line in block.group(1).replace("\\\n", " ").splitlines() if line.strip()]


def tiny_commands(recipe: Path) -> list[list[str]]:
    return [command for command in commands(recipe) if "--tiny" in command]


def planned(recipe: Path) -> list[list[str]]:
    """The commands that forecast for a device that is not here."""
    return [command for command in commands(recipe) if command[:2] in (["memwall", "estimate"], ["memwall", "plan"])]


def in_tier(recipes: list[Path]) -> list[Any]:
    return [
        pytest.param(
            path, id=path.name, marks=pytest.mark.slow(seconds=8) if path.name in CHEAP else pytest.mark.exhaustive
        )
        for path in recipes
    ]


def test_there_are_twelve_and_a_page_lists_them_all() -> None:
    assert len(RECIPES) >= 12
    folders = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {path.name for path in RECIPES}
    listed = re.findall(r"\]\(\.\./recipes/([^/]+)/README\.md\)", PAGE.read_text())
    assert sorted(listed) == [path.name for path in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_has_its_parts(recipe: Path) -> None:
    """A script of a page that does not know memwall, one that takes seconds, and what it costs."""
    text, script = (recipe / "README.md").read_text(), (recipe / "train.py").read_text()
    assert re.match(r"# [^\n]+\n\n\S", text)
    assert re.search(r"^## What it costs$", text, flags=re.MULTILINE)
    assert re.search(r"\*\*(bit-exact|equivalent|changes numerics)\*\*", text)
    assert len(script.splitlines()) <= 120
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(script))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert ("memwall" in imported) == (recipe.name in USES_MEMWALL)
    assert tiny_commands(recipe)
    assert all(command[0] in ("memwall", "python") for command in commands(recipe))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_what_it_costs_is_what_was_measured_or_planned(recipe: Path) -> None:
    """Figures of runs are those of the result file; a recipe for a device that is not here has a forecast's."""
    text, benchmark = (recipe / "README.md").read_text(), _benchmark()
    if planned(recipe):
        assert "simulated" in text
        return
    row = benchmark.results().get(recipe.name)
    if row is None:
        assert NOT_MEASURED in text
        return
    assert NOT_MEASURED not in text
    assert benchmark.section(recipe.name, row) in text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", in_tier(RECIPES))
def test_the_tiny_variant_trains_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    """GIVEN a recipe's tiny commands WHEN they run THEN each trains what the plain script does, losses and weights."""
    missing = [
        name
        for name in ("transformers", "peft", "bitsandbytes")
        if _imports(recipe, name) and not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; make test-recipes has it")
    python = warm_python()
    script = str(recipe / "train.py")
    first = tiny_commands(recipe)[0]
    bare = [*first[first.index("train.py") + 1 :], *(["--plain"] if recipe.name in USES_MEMWALL else [])]
    plain = python.run(script, *bare, "--out", tmp_path / "plain.pt", folder=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert len(_losses(plain.stdout)) >= 3
    weights = torch.load(tmp_path / "plain.pt")
    for command in tiny_commands(recipe):
        memwall_options, script_options = _divided(command)
        started = ["-m", "memwall", *memwall_options] if command[0] == "memwall" else []
        done = python.run(*started, script, *script_options, "--out", tmp_path / "planned.pt", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert _losses(done.stdout) == _losses(plain.stdout)
        if command[0] == "memwall":
            assert re.search(r"^does  ", done.stderr, flags=re.MULTILINE), "a plan of nothing shows nothing"
            assert "within the budget" in done.stderr
        assert _unequal(weights, torch.load(tmp_path / "planned.pt")) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [path for path in RECIPES if planned(path)], ids=lambda path: path.name)
def test_a_forecast_comes_out_as_printed(recipe: Path, tmp_path: Path) -> None:
    """GIVEN a recipe for a device that is not here WHEN its commands run THEN verdict and plan are those printed."""
    text = (recipe / "README.md").read_text()
    for command in planned(recipe):
        output = tmp_path / "plan.json"
        given = [str(output) if word == "plan.json" else word for word in command[1:]]
        done = warm_python().run("-m", "memwall", *given, folder=recipe, timeout_s=400)
        verdict = (done.stdout or done.stderr).splitlines()[0].strip()
        assert verdict in text, verdict
        if output.exists():
            kept, found = (msgspec.json.decode(path.read_bytes()) for path in (recipe / "plan.json", output))
            assert found.get("actions", []) == kept.get("actions", [])  # a file leaves out what is empty


def _benchmark() -> Any:
    found = importlib.util.spec_from_file_location("recipes_benchmark", ROOT / "benchmarks/recipes.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _imports(recipe: Path, name: str) -> bool:
    return re.search(rf"^\s*(from|import) {name}\b", (recipe / "train.py").read_text(), flags=re.MULTILINE) is not None


def _divided(command: list[str]) -> tuple[list[str], list[str]]:
    """The words before the script, without the program, and those after it."""
    place = command.index("train.py")
    return command[1:place], command[place + 1 :]


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss [\d. -]+", printed, flags=re.MULTILINE)


def _unequal(expected: Any, found: Any, where: str = "") -> list[str]:
    """Paths at which saved weights are not the same, to the bit."""
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return [where]
        return [path for key in expected for path in _unequal(expected[key], found[key], f"{where}.{key}")]
    is_same = torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found
    return [] if is_same else [where]
