"""docs/reference.md says what the code has, and the pages ask commands for nothing else."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import memwall
from memwall import integrations
from memwall.cli.app import app

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_is_as_the_code_is() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "reference.py"))["page"]()
    assert REFERENCE.read_text() == made, "the code has changed: make reference"


@pytest.mark.parametrize("package", [memwall, integrations], ids=["memwall", "memwall.integrations"])
def test_every_public_name_is_there(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert sorted(package.__all__) == package.__all__ == dir(package)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'fits'; public names: "):
        package.fits  # noqa: B018


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_give_commands_the_options_that_they_have(page: Path) -> None:
    """GIVEN a call in a page, or a command's row in a table THEN its options are those of that command."""
    text = page.read_text()
    rows = re.findall(r"^\| `memwall (\w+)[^`]*` \|(.*)", text, re.MULTILINE)
    named = [(name, re.findall(r"`(--[a-z-]+)", row)) for name, row in rows]
    # What follows a script is the script's.
    calls = [(name, rest.partition(".py")[0]) for name, rest in re.findall(r"memwall ([a-z]+)( [^`\n]*)", text)]
    named += [(name, re.findall(r"(?<![\w-])--[a-z-]+", rest)) for name, rest in calls]
    commands: Any = typer.main.get_command(app)
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.commands.items()
    }
    assert [
        (name, set(options) - known.get(name, set()))
        for name, options in named
        if set(options) - known.get(name, set())
    ] == []


def test_integrations_load_no_framework_before_they_are_used() -> None:
    code = "import sys, memwall.integrations; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
