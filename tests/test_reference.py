"""docs/reference.md says what the code has, and the names in it can be imported."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import memwall
from memwall import integrations

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference.md"


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


def test_integrations_load_no_framework_before_they_are_used() -> None:
    code = "import sys, memwall.integrations; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
