"""A script of tensors alone is watched from its first backward on, and refused where its steps pass the budget."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from memwall.cli.app import main
from memwall.integrations.scripts.bare_steps import BareSteps
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.patches import Patches

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = """
import torch
weights = [torch.ones(64, 64, requires_grad=True) for _ in range(3)]
momenta = [torch.zeros(64, 64) for _ in weights]
for _ in range(4):
    x = torch.ones(8, 64)
    for weight in weights:
        x = torch.tanh(x @ weight)
    gradients = torch.autograd.grad(x.square().mean(), weights)
    momenta = [0.9 * momentum + gradient for momentum, gradient in zip(momenta, gradients)]
    weights = [(weight - 0.1 * each).detach().requires_grad_() for weight, each in zip(weights, momenta)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["8GiB", "100GiB"], ids=["planned", "ample"])
def test_a_script_without_a_model_ends_well_within_its_budget(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["run", "--budget", budget, "train.py"]) == 0


@pytest.mark.slow
def test_a_script_without_a_model_is_refused_before_its_second_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT + "print('done')\n")
    assert main(["run", "--budget", "64MiB", "train.py"]) == 3
    said = capsys.readouterr()
    assert "done" not in said.out
    assert "has called no model: no plan makes its steps smaller" in said.err
    assert re.search(r"the smallest feasible one is [\d.,]+ \w+,", said.err)


ENERGY = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    net.requires_grad_(False)
    drawn = torch.rand(32, 64, requires_grad=True)
    for _ in range(4):
        net(drawn).sum().backward()
        drawn.data.add_(drawn.grad, alpha=-0.1)
        drawn.grad = None
    net.requires_grad_(True)
    loss = net(drawn.detach()).mean() - net(torch.rand(32, 64)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_model_that_is_frozen_while_samples_are_drawn_from_it_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN an energy model, whose samples come first WHEN nothing fits THEN its training step is what is judged."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ENERGY)
    assert main(["run", "--budget", "64MiB", "train.py"]) == 3
    said = capsys.readouterr().err
    assert "has called no model" not in said
    assert re.search(r"the smallest feasible one is [\d.,]+ \w+,", said)


def test_a_backward_is_of_no_step_while_all_that_optimizers_train_is_frozen() -> None:
    watch, patches = ScriptWatch("train.py", lambda *_: None), Patches("listens")
    watch.listen(patches)
    assert not watch.has_all_frozen
    net, image = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    first = torch.optim.SGD(net.parameters(), lr=0.1)
    assert not watch.has_all_frozen
    net.requires_grad_(False)
    assert watch.has_all_frozen
    later = torch.optim.SGD([image], lr=0.1)
    assert not watch.has_all_frozen, "a later optimizer trains the image"
    patches.undo()
    del first, later


def test_every_way_to_compute_gradients_is_heard_of_until_the_end() -> None:
    weight, heard = nn.Parameter(torch.ones(3)), []
    bare = BareSteps(lambda: heard.append(1))
    bare.listen()
    weight.sum().backward()
    torch.autograd.backward(weight.sum())
    torch.autograd.grad(weight.sum(), weight)
    assert bare.num_seen == len(heard) == 3
    bare.end()
    weight.sum().backward()
    assert len(heard) == 3
