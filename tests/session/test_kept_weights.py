"""A script's text says whether it keeps a copy of its weights, before it does."""

import importlib
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from memwall.predict.first_step import FirstStep
from memwall.session.loop.kept_weights import line_that_keeps_weights, with_kept_weights
from memwall.session.watch.kept_tensors import KeptTensors
from memwall.trace.records import Trace
from memwall.trace.trace_builder import TraceBuilder

MIB = 1 << 20
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
_KEEPS_NONE = {
    "before any loop": "best = copy.deepcopy(model.state_dict())\nfor _ in ():\n    pass",
    "before a function's loop": "def train(m):\n    best = deepcopy(m.state_dict())\n    for _ in ():\n        pass",
    "references": "for _ in ():\n    best = model.state_dict()",
    "references by name": "for _ in ():\n    best = {k: v.detach() for k, v in model.state_dict().items()}",
    "into another model": "for _ in ():\n    found = target.load_state_dict(copy.deepcopy(model.state_dict()))",
    "into a file": "for _ in ():\n    found = torch.save(copy.deepcopy(model.state_dict()), path)",
    "a copy of something else": "for _ in ():\n    batch = copy.deepcopy(batch)\n    model.state_dict()",
    "no Python": "%matplotlib inline\nfor _ in ():\n    best = copy.deepcopy(model.state_dict())",
}
_ASKS = "from memwall.session.loop.kept_weights import line_that_keeps_weights\n"
_ANSWERS = "\ndef line_here(is_on_device):\n    return line_that_keeps_weights(is_on_device=is_on_device)\n"


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


def test_what_comes_between_steps_beside_the_usual_is_counted_once() -> None:
    """GIVEN batches of 8 MiB that come each time WHEN 64 MiB more do, of which 40 were to come THEN 24 are told."""
    kept = KeptTensors(lambda: msgspec.structs.replace(FIRST, kept_bytes=40 * MIB))
    told = []
    for risen in (8, 9, 72, 8, 72, -100, 8):
        kept.end_step(500 * MIB, 1)
        told.append(kept.begin_step((500 + risen) * MIB, 1) // MIB)
    assert told == [0, 0, 24, 0, 64, 0, 0]


def test_what_another_plan_moves_is_not_counted() -> None:
    kept = KeptTensors(lambda: None)
    kept.end_step(500 * MIB, 1)
    assert kept.begin_step(500 * MIB, 1) == 0
    kept.end_step(500 * MIB, 1)
    assert kept.begin_step(600 * MIB, 2) == 0
    kept.end_step(500 * MIB, 2)
    assert kept.begin_step(600 * MIB, 2) == 100 * MIB
    assert kept.begin_step(700 * MIB, 2) == 0, "no step has ended since"


def _trace() -> Trace:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    return builder.trace(optimizer)
