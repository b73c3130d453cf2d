"""A module is heard of once it has run, whoever imports it and when, and Python finds it as without that."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from memwall.late_imports import once_imported
from memwall.patches import Patches


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    return "imported_late"


def test_it_is_heard_of_once_it_has_run_and_by_all_who_ask(named: str) -> None:
    before, heard, patches = list(sys.meta_path), [], Patches("hears of a module")

    def hears(module: ModuleType) -> None:
        heard.append(module.value)

    once_imported(patches, named, hears)
    once_imported(patches, named, hears)
    assert heard == []
    module = importlib.import_module(named)
    assert heard == [1, 1]
    assert sys.meta_path == before
    once_imported(patches, named, hears)
    assert heard == [1, 1, 1]
    assert module.__spec__ is not None
    assert module.__spec__.origin is not None
    patches.undo()


def test_who_has_let_go_is_not_told(named: str) -> None:
    before, patches = list(sys.meta_path), Patches("hears of a module")
    once_imported(patches, named, lambda _: pytest.fail("told"))
    patches.undo()
    assert sys.meta_path == before
    importlib.import_module(named)


def test_a_module_that_is_not_there_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = Patches("hears of a module")
    once_imported(patches, "not_there_at_all", lambda _: pytest.fail("told"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_there_at_all")
    patches.undo()
