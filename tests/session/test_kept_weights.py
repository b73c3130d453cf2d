"""A script's text says whether it keeps a copy of its weights, before it does."""

import ast
import copy
import importlib
import linecache
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memwall.predict.first_step import FirstStep
from memwall.session.loop import kept_weights, script_text
from memwall.session.loop.kept_copies import KeptCopies, copies_bytes
from memwall.session.loop.kept_weights import line_that_keeps_weights, with_kept_weights
from memwall.trace.records import Trace
from memwall.trace.trace_builder import TraceBuilder

duplicate = copy.deepcopy  # by another name: this file is a script that is read, too
FIRST = FirstStep(needed_bytes=0, in_memory_bytes=0, stays_from_bytes=0)

_KEEPS = {
    "deepcopy in a loop": "for _ in ():\n    best = copy.deepcopy(model.state_dict())",
    "deepcopy of a copy's name": "while False:\n    best = {'model': deepcopy(model.state_dict()), 'epoch': 3}",
    "deepcopy in a branch of a loop": "for _ in ():\n    if 1:\n        loss, best = 1, copy.deepcopy(m.state_dict())",
    "clones of each": "for _ in ():\n    best = {k: v.detach().clone() for k, v in model.state_dict().items()}",
    "clones by dict": "for _ in ():\n    best = dict((k, v.clone()) for k, v in model.state_dict().items())",
    "at the end of a list": "for _ in ():\n    snapshots.append(copy.deepcopy(model.state_dict()))",
    "a method that a loop calls": "class Stopping:\n    def keep(self, m):\n        self.b = deepcopy(m.state_dict())",
    "what a function gives": "def weights_of(model):\n    return copy.deepcopy(model.state_dict())",
    "a loop in a function": "def train(model):\n    for _ in ():\n        best = copy.deepcopy(model.state_dict())",
}
_KEEPS_BY_NAME = {
    "the model itself": "for _ in ():\n    if 1:\n        loss, best = 1, copy.deepcopy(net)",
    "a model of an object's": "for _ in ():\n    best = copy.deepcopy(holder.net).eval()",
    "into a list": "for _ in ():\n    snapshots.append(copy.deepcopy(net))",
    "clones of parameters": "for _ in ():\n    if 1:\n        best = [p.detach().clone() for p in net.parameters()]",
    "a method's clones": "class Best:\n    def keep(self, m):\n        self.b = [p.clone() for p in m.parameters()]",
}
_KEEPS_NONE_BY_NAME = {
    "another model": "for _ in ():\n    best = copy.deepcopy(other)",
    "a part of the model": "for _ in ():\n    config = copy.deepcopy(net.config)",
    "in place of another": "for _ in ():\n    other = copy.deepcopy(net)",
    "for the turn of a loop": "for _ in ():\n    before = [p.clone() for p in net.parameters()]",
    "gradients": "for _ in ():\n    if 1:\n        kept = [p.grad.clone() for p in net.parameters()]",
    "joined": "def flat(m):\n    return torch.cat([p.clone().view(-1) for p in m.parameters()])",
    "a function's own": "def change(m):\n    before = [p.clone() for p in m.parameters()]",
}
_KEEPS_NONE = {
    "before any loop": "best = copy.deepcopy(model.state_dict())\nfor _ in ():\n    pass",
    "before a function's loop": "def train(m):\n    best = deepcopy(m.state_dict())\n    for _ in ():\n        pass",
    "references": "for _ in ():\n    best = model.state_dict()",
    "references by name": "for _ in ():\n    best = {k: v.detach() for k, v in model.state_dict().items()}",
    "into another model": "for _ in ():\n    found = target.load_state_dict(copy.deepcopy(model.state_dict()))",
    "an optimizer's state": "for _ in ():\n    state = copy.deepcopy(optimizer.state_dict())",
    "into a file": "for _ in ():\n    found = torch.save(copy.deepcopy(model.state_dict()), path)",
    "a copy of something else": "for _ in ():\n    batch = copy.deepcopy(batch)\n    model.state_dict()",
    "no Python": "%matplotlib inline\nfor _ in ():\n    best = copy.deepcopy(model.state_dict())",
}
_ASKS = "from memwall.session.loop.kept_weights import line_that_keeps_weights\n"
_ANSWERS = """
def line_here(is_on_device, models=()):
    return line_that_keeps_weights(models, is_on_device=is_on_device)
"""


def said_by(text: str, folder: Path, *, is_on_device: bool = False) -> str:
    """Returns the line that is found from within a script that begins with two lines of its own."""
    path = folder / "kept_script.py"
    path.write_text(f"{_ASKS}\n{text}\n{_ANSWERS}")
    found: dict[str, object] = {}
    header = compile(_ASKS + _ANSWERS, str(path), "exec")
    exec(header, found)
    return found["line_here"](is_on_device)  # type: ignore[operator]


@pytest.mark.parametrize("name", _KEEPS)
def test_a_line_that_keeps_a_copy_is_found(name: str, tmp_path: Path) -> None:
    line = 3 + next(number for number, text in enumerate(_KEEPS[name].splitlines()) if "state_dict" in text)
    assert said_by(_KEEPS[name], tmp_path) == f"kept_script.py:{line}"


@pytest.mark.parametrize("name", _KEEPS_NONE)
def test_no_other_line_is(name: str, tmp_path: Path) -> None:
    assert said_by(_KEEPS_NONE[name], tmp_path) == ""


@pytest.mark.parametrize("name", [*_KEEPS_BY_NAME, *_KEEPS_NONE_BY_NAME])
def test_a_name_that_stands_for_what_is_trained_is_told_from_others(name: str, tmp_path: Path) -> None:
    text = (_KEEPS_BY_NAME | _KEEPS_NONE_BY_NAME)[name]
    path = tmp_path / "named_script.py"
    path.write_text(f"{_ASKS}\n{text}\n{_ANSWERS}")
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    holder = types.SimpleNamespace(net=net)
    found: dict[str, Any] = {}
    exec(compile(_ASKS + _ANSWERS, str(path), "exec"), found)
    line = 3 + next(number for number, part in enumerate(text.splitlines()) if "deepcopy" in part or "clone" in part)
    assert found["line_here"](False, [net]) == (f"named_script.py:{line}" if name in _KEEPS_BY_NAME else "")
    del other, holder


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_copy_in_the_machines_memory_is_none_on_a_device(is_on_device: bool, tmp_path: Path) -> None:
    text = "for _ in ():\n    best = {k: v.cpu().clone() for k, v in model.state_dict().items()}"
    assert bool(said_by(text, tmp_path, is_on_device=is_on_device)) != is_on_device


def test_a_module_that_a_script_imports_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a class of another file that keeps them WHEN a script has imported it THEN that file's line is found."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_stopping.py").write_text(f"import copy\n{_KEEPS['a method that a loop calls']}")
    (tmp_path / "own_script.py").write_text(f"{_ASKS}from own_stopping import Stopping\n{_ANSWERS}")
    script = importlib.import_module("own_script")
    assert script.line_here(False) == "own_stopping.py:4"


def test_of_a_script_that_keeps_none_nothing_is_known() -> None:
    assert line_that_keeps_weights(is_on_device=False) == ""
    assert with_kept_weights(FIRST, _trace(), nn.Linear(4, 4)) == FIRST


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_copy_that_is_there_already_gives_its_place_to_the_next(
    has_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a loop that replaces a copy from before its first step THEN no step holds two."""
    monkeypatch.setattr(kept_weights, "line_that_keeps_weights", lambda _, *, is_on_device: "train.py:7")
    model = nn.Linear(1009, 13)
    best = duplicate(model.state_dict()) if has_copy else None
    first = with_kept_weights(FIRST, _trace(), model)
    assert (first.kept_at, first.kept_bytes) == (("", 0) if has_copy else ("train.py:7", 4 * (1009 * 13 + 13)))
    del best


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError(f"no module named after {name}")


class _Proxy:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("not bound")


def test_what_a_script_has_imported_is_asked_for_nothing(tmp_path: Path) -> None:
    """GIVEN a lazy module, a proxy, and an expression without end THEN the script is read all the same."""
    path = tmp_path / "odd_script.py"
    keeps = _KEEPS["deepcopy in a loop"]
    endless = "def unused(x):\n    return " + " + ".join(["x"] * 3000)
    found: dict[str, object] = {"lazy": _Lazy("lazy"), "proxy": _Proxy()}
    for text, line in ((keeps, "odd_script.py:3"), (f"{keeps}\n{endless}", "")):
        path.write_text(f"{_ASKS}{text}\n")
        linecache.checkcache(str(path))
        exec(compile(_ASKS + _ANSWERS, str(path), "exec"), found)
        assert found["line_here"](False) == line  # type: ignore[operator]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1019, 17)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 1019)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_copies_that_come_after_a_state_dict_was_asked_for_are_counted() -> None:
    """GIVEN one copy that was to come WHEN two come, and one is replaced, and batches and gradients with them THEN one
    is told."""
    model, _ = trained()
    own_bytes = sum(each.nbytes for each in model.parameters())
    kept = KeptCopies(lambda: model, lambda: msgspec.structs.replace(FIRST, kept_bytes=own_bytes), lambda: 0)
    assert kept.begin_step() == 0, "nobody has asked for a state dict"
    copies, told, others = [], [], []
    for num in (1, 1, 0):
        kept.saving_begins()
        copies += [duplicate(model.state_dict()) for _ in range(num)]
        kept.saving_begins()  # as an optimizer's is asked for as well
        others.append(torch.zeros(1 << 20))
        copies[0] = duplicate(model.state_dict())
        told.append(kept.begin_step())
    assert told == [0, own_bytes, 0]


@pytest.mark.parametrize("kind", ["a model", "a list", "batches"])
def test_copies_that_come_to_be_held_are_counted(kind: str) -> None:
    """GIVEN what lives on from one step to the next WHEN that is a copy THEN it is told, once."""
    model, _ = trained()
    own_bytes, live_bytes = sum(each.nbytes for each in model.parameters()), [1 << 20]
    kept = KeptCopies(lambda: model, lambda: None, lambda: live_bytes[-1])
    copy_of = {"a model": duplicate, "a list": lambda one: [p.detach().clone() for p in one.parameters()]}
    told, held = [kept.begin_step()], []
    for _ in range(2):
        held.append(copy_of.get(kind, lambda _: torch.zeros(own_bytes // 4))(model))
        live_bytes.append(live_bytes[-1] + own_bytes)
        told += [kept.begin_step(), kept.begin_step()]
    assert told == [0, *[0 if kind == "batches" else own_bytes, 0] * 2]


def test_what_shares_the_weights_memory_is_no_copy() -> None:
    """GIVEN a state dict, a model of the same form, and moments by other names THEN none of these is a copy."""
    model, optimizer = trained()
    other, referred = duplicate(model), model.state_dict()
    assert len(optimizer.state) == len(referred) == len(other.state_dict())
    assert copies_bytes(model) == 0
    clones = {name: tensor.clone() for name, tensor in referred.items()}
    assert copies_bytes(model) == sum(each.nbytes for each in clones.values())


def _trace() -> Trace:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    return builder.trace(optimizer)


class Odd:
    """Has a list where a model has its modules."""

    def __init__(self) -> None:
        self._modules = [nn.Linear(2, 2)]

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


def test_an_object_that_is_no_model_is_not_asked_for_what_it_may_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"odd": Odd(), "model": nn.Sequential(nn.Linear(2, 2)), "kind": nn.Linear, "number": 3}
    monkeypatch.setattr(script_text, "scopes", lambda: [("here", here)])
    names = script_text.Names()

    def value_of(text: str) -> object:
        return names.value_of(ast.parse(text, mode="eval").body)

    assert [value_of(text) for text in ("odd.best", "number.real", "none.best", "model.best")] == [None] * 4
    assert value_of("kind.forward") is nn.Linear.forward
    assert value_of("model._modules") is here["model"]._modules  # type: ignore[attr-defined]
