"""A workload named on the command line: what is accepted, and what each mistake is told."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memwall.errors import UsageError
from memwall.trace.spec import load_workload
from memwall.trace.workload import Workload

GOOD = """
import torch
from memwall import Workload

CALLS = []

def tiny():
    return Workload(
        model=lambda: CALLS.append("model") or torch.nn.Linear(4, 1),
        batch=lambda: torch.ones(2, 4),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )

def broken():
    raise RuntimeError("no such checkpoint")

def number():
    return 7

READY = tiny()
SIZE = 3
"""
FORMS = "expected package.module:factory or path/file.py:factory, a function that returns a memwall.Workload"


@pytest.fixture(autouse=True)
def _modules_and_path_restored() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("memwall_spec_", "spec_under_test")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "spec_under_test.py"
    path.write_text(GOOD)
    return path


def message_of(spec: str) -> str:
    with pytest.raises(UsageError) as raised:
        load_workload(spec)
    return str(raised.value)


def test_file_and_module_name_the_same_factory(file: Path) -> None:
    for spec in (f"{file}:tiny", "spec_under_test.py:tiny", "spec_under_test:tiny", "spec_under_test.py:READY"):
        workload = load_workload(spec)
        assert workload.make_batch().shape == (2, 4)


def test_nothing_is_built_before_it_is_asked_for(file: Path) -> None:
    workload = load_workload(f"{file}:tiny")
    calls = sys.modules["memwall_spec_spec_under_test"].CALLS
    assert calls == []
    model = workload.make_model()
    assert calls == ["model"]
    optimizer = workload.make_optimizer(model)
    assert [parameter.shape for group in optimizer.param_groups for parameter in group["params"]] == [(1, 4), (1,)]


def test_file_may_import_its_neighbours(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "spec_under_test_helper.py").write_text("WIDTH = 2\n")
    file.write_text("import spec_under_test_helper\n" + GOOD)
    monkeypatch.chdir("/")
    assert load_workload(f"{file}:tiny").make_batch().shape == (2, 4)


def test_no_factory_named() -> None:
    assert message_of("train.py") == f"'train.py' names no factory; {FORMS}"
    assert message_of("train.py:") == f"'train.py:' names no factory; {FORMS}"


def test_missing_file() -> None:
    assert message_of("nowhere/train.py:tiny") == (
        f"'nowhere/train.py:tiny': there is no file nowhere/train.py; {FORMS}"
    )


def test_missing_module(file: Path) -> None:
    assert message_of("nowhere.train:tiny") == (
        f"'nowhere.train:tiny': there is no module 'nowhere' in {file.parent} or installed"
    )


def test_missing_factory_lists_those_there_are(file: Path) -> None:
    assert message_of("spec_under_test.py:tyni") == (
        "'spec_under_test.py:tyni': spec_under_test.py has no 'tyni'; it defines broken, number, tiny"
    )


def test_factory_that_fails_names_the_line(file: Path) -> None:
    assert message_of(f"{file}:broken") == (
        f"'{file}:broken': broken() failed: RuntimeError: no such checkpoint ({file}, line 16)"
    )


def test_file_that_fails_to_import_names_the_line(file: Path) -> None:
    file.write_text("import torch\nimport nowhere_at_all\n")
    assert message_of(f"{file}:tiny") == (
        f"'{file}:tiny': importing {file} failed: ModuleNotFoundError: No module named 'nowhere_at_all' "
        f"({file}, line 2)"
    )


def test_module_whose_import_is_missing_is_not_called_missing_itself(file: Path) -> None:
    file.write_text("import nowhere_at_all\n")
    assert message_of("spec_under_test:tiny").startswith(
        "'spec_under_test:tiny': importing spec_under_test failed: ModuleNotFoundError: No module named"
    )


def test_factory_that_returns_something_else(file: Path) -> None:
    assert message_of(f"{file}:number") == f"'{file}:number': number() returned int; expected a memwall.Workload"


def test_name_that_is_no_factory(file: Path) -> None:
    assert message_of(f"{file}:SIZE") == f"'{file}:SIZE': SIZE is int; {FORMS}"


def make_workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "model": lambda: torch.nn.Linear(4, 1),
        "batch": torch.ones(2, 4),
        "loss": lambda model, batch: model(batch).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return Workload(**(fields | changes))


def test_workload_takes_a_model_and_a_batch_as_they_are() -> None:
    model, batch = torch.nn.Linear(4, 1), torch.ones(2, 4)
    workload = make_workload(model=model, batch=batch)
    assert workload.make_model() is model
    assert workload.make_batch() is batch


def test_workload_optimizer_gets_trained_parameters_only() -> None:
    model = torch.nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    optimizer = make_workload().make_optimizer(model)
    assert optimizer.param_groups[0]["params"] == [model.weight]


def test_workload_with_an_optimizer_instance_says_how_to_write_it() -> None:
    with pytest.raises(UsageError) as raised:
        make_workload(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert str(raised.value) == (
        "Workload: optimizer is SGD; expected a function optimizer(params) returning a torch.optim.Optimizer; "
        "for an optimizer class write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4)"
    )


@pytest.mark.parametrize(
    ("field", "make", "message"),
    [
        ("model", "make_model", "Workload: model() returned int; expected a torch.nn.Module"),
        ("optimizer", "make_optimizer", "Workload: optimizer(params) returned int; expected a torch.optim.Optimizer"),
    ],
)
def test_workload_factory_that_returns_something_else(field: str, make: str, message: str) -> None:
    workload = make_workload(**{field: lambda *arguments: 7})
    arguments = [torch.nn.Linear(4, 1)] if field == "optimizer" else []
    with pytest.raises(UsageError) as raised:
        getattr(workload, make)(*arguments)
    assert str(raised.value) == message
