"""A script that trains one model after another, as folds of a cross-validation, keeps none of them but the present."""

import os
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


def watch_of(begun: list[set[int]]) -> ScriptWatch:
    """Returns one that notes the ids of the models each time that it begins with some: the list leads to none."""
    return ScriptWatch("train.py", lambda model, called, has_optimizer: begun.append(set(map(id, models_of(model)))))


def hidden(watch: ScriptWatch) -> partial[None]:
    """Returns what calls a model that no variable leads to, as a step of its training does."""

    def called(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        watch.before_forward(model)
        watch.after_forward(model)
        watch.check_optimizer(optimizer)

    model = nn.Linear(2, 2)
    return partial(called, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_was_let_go_is_found_again_with_its_optimizer() -> None:
    """GIVEN a model that only a library holds WHEN another is trained, and it again THEN its steps are followed."""
    begun: list[set[int]] = []
    watch = watch_of(begun)
    calls = [hidden(watch)]
    calls[0]()
    calls.append(hidden(watch))
    for _ in range(3):
        for call in calls:
            call()
    assert all(watch.check_optimizer(call.args[1]) for call in calls)
    assert begun[-1] == {id(call.args[0]) for call in calls}
    assert len(begun) <= 4


def test_a_module_that_nothing_trains_lets_no_model_go() -> None:
    """GIVEN a model that only a library holds WHEN a network that measures its loss is called THEN it is followed."""
    begun: list[set[int]] = []
    watch = watch_of(begun)
    call, loss_network = hidden(watch), nn.Linear(2, 2)
    for _ in range(3):
        call()
        watch.before_forward(loss_network)
    assert begun == [{id(call.args[0])}]
    assert watch.check_optimizer(call.args[1])


def test_a_forked_process_is_not_looked_at() -> None:
    """GIVEN a process that has inherited the hooks WHEN it trains THEN they do nothing there."""
    begun: list[set[int]] = []
    watch = watch_of(begun)
    call = hidden(watch)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call()
            status = len(begun) + watch.check_optimizer(call.args[1])
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    call()
    assert len(begun) == 1


@pytest.mark.slow
def test_parameters_of_earlier_folds_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folds.py").write_text(FOLDS)
    assert main(["run", "--budget", "8GiB", "folds.py"]) == 0
    assert Path("alive.txt").read_text() == "0 0 0 0 0 0 0 0 0"
