"""A script that trains one model after another, as folds of a cross-validation, keeps none of them but the present."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from memwall.cli.app import main
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.trace.together import models_of

FOLDS = """
import gc, weakref
import torch

def fold():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        alive.append(sum(earlier() is not None for earlier in folds))
    folds.append(weakref.ref(next(model.parameters())))

folds, alive = [], []
for _ in range(3):
    fold()
gc.collect()
open("alive.txt", "w").write(" ".join(map(str, alive)))
"""


def test_models_that_only_a_library_holds_are_found_again_and_kept() -> None:
    """GIVEN two models that no variable leads to WHEN they are called in turns THEN both are known, and stay it."""

    def hidden() -> list[partial[None]]:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return [partial(called, model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]

    def called(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        watch.before_forward(model)
        watch.after_forward(model)

    begun: list[int] = []
    watch = ScriptWatch("train.py", lambda model, called, has_optimizer: begun.append(len(models_of(model))))
    calls = hidden()
    for _ in range(5):
        for call in calls:
            call()
    assert begun[-1] == 2
    assert len(begun) <= 4


@pytest.mark.slow
def test_parameters_of_earlier_folds_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folds.py").write_text(FOLDS)
    assert main(["run", "--budget", "8GiB", "folds.py"]) == 0
    assert Path("alive.txt").read_text() == "0 0 0 0 0 0 0 0 0"
