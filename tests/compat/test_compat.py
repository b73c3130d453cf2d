"""Scripts of each kind, unmodified, at 70 % of what they take free and at the smallest budget that they are told.

Their memory is sampled from outside, over the whole process tree. `python benchmarks/compat.py` prints all as a table.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tests/compat/scripts").glob("*.py"))


def _benchmark() -> Any:
    found = importlib.util.spec_from_file_location("compat_benchmark", ROOT / "benchmarks/compat.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_the_budget_that_a_refusal_names_is_kept_with_the_same_weights(script: Path) -> None:
    benchmark = _benchmark()
    if missing := benchmark.missing_packages(script):
        pytest.skip(f"not installed: {', '.join(missing)}")
    row = benchmark.measured(script)
    assert benchmark.is_kept(row), row
