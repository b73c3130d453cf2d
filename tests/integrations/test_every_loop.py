"""Every kind of loop is planned under `memwall run`, and ends with the weights of a run without it."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from combinations import exhaustive

from memwall.cli.app import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

_MODELS = """
import copy
import torch
from torch import nn
torch.manual_seed(0)
def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)),
                         nn.Linear(64, outputs))
"""
_END = """
torch.save([p.detach() for model in models for p in model.parameters()], "weights.pt")
"""
_LOOPS = {
    "a gan": """
models = generator, critic = network(4, 4), network(4, 1)
optimizer_g, optimizer_c = (torch.optim.Adam(model.parameters(), lr=0.01) for model in models)
for _ in range(3):
    fake = generator(torch.randn(32, 4))
    optimizer_c.zero_grad()
    critic(torch.randn(32, 4)).mean().backward()
    critic(fake.detach()).mean().neg().backward()
    optimizer_c.step()
    optimizer_g.zero_grad()
    critic(fake).mean().backward()
    optimizer_g.step()
""",
    "an encoder and a decoder": """
models = encoder, decoder = network(4, 8), network(8, 4)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
for _ in range(3):
    decoder(encoder(torch.randn(32, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a teacher that is called with gradients on": """
teacher, *models = network(4, 4), network(4, 4)
optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
for _ in range(3):
    data = torch.randn(32, 4)
    (models[0](data) - teacher(data).detach()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a teacher in lower precision that is called with gradients on": """
models = [network(4, 4)]
teacher = copy.deepcopy(models[0]).bfloat16()
optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
for _ in range(3):
    data = torch.randn(32, 4)
    (teacher(data.bfloat16()).detach().float() - models[0](data)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "mixed precision by hand, with a second model": """
models = [network(4, 4)]
lower = copy.deepcopy(models[0]).bfloat16()
optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
for _ in range(3):
    lower(torch.randn(32, 4).bfloat16()).float().square().mean().backward()
    for one, other in zip(models[0].parameters(), lower.parameters()):
        one.grad, other.grad = other.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(models[0].parameters(), lower.parameters()):
            other.copy_(one)
""",
    "steps by hand": """
models = [network(4, 4)]
for _ in range(3):
    models[0](torch.randn(32, 4)).square().mean().backward()
    for parameter in models[0].parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None
""",
    "mixed precision by hand, whose second step is left out": """
models = [network(4, 4).bfloat16()]
copies = [parameter.detach().float().requires_grad_() for parameter in models[0].parameters()]
optimizer = torch.optim.Adam(copies, lr=0.01)
for step in range(4):
    models[0](torch.randn(32, 4).bfloat16()).float().square().mean().backward()
    if step != 1:
        for copy, parameter in zip(copies, models[0].parameters()):
            copy.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, models[0].parameters()):
                parameter.copy_(copy)
    models[0].zero_grad()
""",
    "mixed precision by hand, whose parameters are new tensors": """
models = [network(4, 4).bfloat16()]
copies = [parameter.detach().float() for parameter in models[0].parameters()]
optimizer = torch.optim.Adam(copies, lr=0.01)
for step in range(3):
    for copy, parameter in zip(copies, models[0].parameters()):
        parameter.data = copy.bfloat16()
    models[0](torch.randn(32, 4).bfloat16()).float().square().mean().backward()
    for copy, parameter in zip(copies, models[0].parameters()):
        copy.grad, parameter.grad = parameter.grad.float(), None
    optimizer.step()
""",
    "a closure": """
models = [network(4, 4)]
optimizer = torch.optim.LBFGS(models[0].parameters(), max_iter=3)
data = torch.randn(32, 4)
def closure():
    optimizer.zero_grad()
    loss = models[0](data).square().mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
""",
    "parts that are called, and no whole": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = network(4, 8), nn.ModuleList([network(8, 8), network(8, 4)])
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x
models = [Model()]
optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
for _ in range(4):
    models[0].forward(torch.randn(32, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "layers that train themselves by their forwards": """
class Layer(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    def forward(self, x):
        return torch.relu(torch.mm(x / (x.norm(2, 1, keepdim=True) + 1e-4), self.weight.T) + self.bias)
models = [Layer(4, 64), Layer(64, 64)]
data = torch.randn(32, 4)
for layer in models:
    for _ in range(3):
        (layer.forward(data).square().mean() - layer.forward(-data).square().mean()).backward()
        layer.optimizer.step()
        layer.optimizer.zero_grad()
    data = layer.forward(data).detach()
""",
    "a second stage": """
models = [network(4, 4), network(4, 4)]
for model in models:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(32, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
}


_NUM_STEPS = {
    "a second stage": 6,
    "parts that are called, and no whole": 4,
    "layers that train themselves by their forwards": 6,
    "mixed precision by hand, whose second step is left out": 4,
}
_CHEAPEST = (
    "a gan",
    "a teacher in lower precision that is called with gradients on",
    "steps by hand",
    "mixed precision by hand, whose second step is left out",
    "mixed precision by hand, whose parameters are new tensors",
)


@pytest.mark.parametrize("name", [name if name in _CHEAPEST else exhaustive(name) for name in _LOOPS])
def test_a_loop_is_planned_and_trains_as_it_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_MODELS + _LOOPS[name] + _END)
    runpy.run_path("train.py", run_name="__main__")
    plain = torch.load("weights.pt")
    Path("weights.pt").unlink()
    assert main(["run", "--budget", "8GiB", "--report", "run.json", "train.py"]) == 0, capsys.readouterr().err
    assert all(map(torch.equal, torch.load("weights.pt"), plain))
    report = json.loads(Path("run.json").read_text())
    assert report["within_budget"]
    assert report["measured"]["steps"] == _NUM_STEPS.get(name, 3)
