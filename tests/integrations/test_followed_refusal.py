"""A refusal is followed as told: the script runs again under the budget that was named, and keeps to it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from combinations import exhaustive
from warm_python import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The second has tables that a first step without room has on disk, where no plan for SGD can have them. The third has a
# teacher that is built on disk under a small budget, and in memory under the one that is told. The fourth evaluates all
# of its data at once after each step, the fifth once it has trained, the sixth before and after, in a few parts.
_SCRIPTS = {
    "mlp": """
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters())
def loss_of(step):
    return nn.functional.cross_entropy(model(torch.randn(512, 1024)), torch.randint(0, 10, (512,)))
""",
    "tables": """
class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, 16, mode="sum", sparse=True) for _ in range(4))
        self.top = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    def forward(self, rows):
        return self.top(torch.cat([table(part) for table, part in zip(self.tables, rows)], 1)).squeeze(1)
model = Ranker()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(step):
    rows = [torch.randint(0, 100_000, (8192, 10)) for _ in range(4)]
    return nn.functional.binary_cross_entropy_with_logits(model(rows), torch.rand(8192).round())
""",
    "teacher": """
import copy
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.ReLU())])
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss_of(step):
    for old, new in zip(teacher.parameters(), model.parameters()) if step else ():
        old.data = 0.99 * old.data + 0.01 * new.data
    data = torch.randn(64, 2048)
    return nn.functional.mse_loss(model(data), teacher(data))
""",
    "evaluation": """
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
data, labels = torch.randn(16384, 512), torch.randint(0, 10, (16384,))
def loss_of(step):
    return nn.functional.cross_entropy(model(data[:256]), labels[:256])
@torch.no_grad()
def after_step():
    (model(data).argmax(1) == labels).float().mean()
""",
    "late evaluation": """
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
data, labels = torch.randn(16384, 512), torch.randint(0, 10, (16384,))
def loss_of(step):
    return nn.functional.cross_entropy(model(data[:256]), labels[:256])
def after_step():
    if step:
        with torch.no_grad():
            (model(data).argmax(1) == labels).float().mean()
""",
    "early evaluation": """
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
data, labels = torch.randn(16384, 512), torch.randint(0, 10, (16384,))
def loss_of(step):
    return nn.functional.cross_entropy(model(data[:256]), labels[:256])
@torch.no_grad()
def losses():
    return [nn.functional.cross_entropy(model(data[k : k + 8192]), labels[k : k + 8192]) for k in (0, 8192)]
losses()
def after_step():
    if step:
        losses()
""",
}
_EVALUATED = {"evaluation": 16384, "late evaluation": 16384, "early evaluation": 8192}
_LOOP = """
for step in range(2):
    optimizer.zero_grad()
    loss_of(step).backward()
    optimizer.step()
    globals().get("after_step", int)()
"""

_BY_TORCH_FUNC = """
import torch
from torch import nn
from torch.func import functional_call, grad
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
def loss_of(weights, data, labels):
    return nn.functional.cross_entropy(functional_call(model, weights, data), labels)
for _ in range(4):
    gradients = grad(loss_of)(weights, torch.randn(2048, 512), torch.randint(10, (2048,)))
    weights = {name: value - 0.1 * gradients[name] for name, value in weights.items()}
"""


def run_under(budget: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    arguments = ("-m", "memwall", "run", "--budget", budget, "--report", "run.json", "train.py")
    return warm_python().run(*arguments, folder=folder, timeout_s=110)


@pytest.mark.parametrize(
    "name", ["mlp", "teacher", "evaluation", "late evaluation", "early evaluation", exhaustive("tables")]
)
def test_the_budget_that_a_refusal_names_is_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\nfrom torch import nn\n{_SCRIPTS[name]}{_LOOP}")
    refused = run_under("64MiB", tmp_path)
    assert refused.returncode == 3, refused.stderr
    samples = f"an evaluation of {_EVALUATED.get(name, 'as many')} samples"
    assert samples in refused.stderr, refused.stderr
    named = re.search(r"the smallest feasible one is (.+?),", refused.stderr)
    assert named is not None, refused.stderr
    followed = run_under(named.group(1), tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert json.loads((tmp_path / "run.json").read_text())["within_budget"]


@pytest.mark.parametrize("has_graph", [exhaustive(False), True], ids=["copies", "copies that require gradients"])
def test_so_is_that_of_steps_by_torch_func_that_no_plan_makes_smaller(has_graph: bool, tmp_path: Path) -> None:
    """GIVEN copies that require gradients THEN those by torch.func hold graphs of their own from step to step."""
    detached = "detach().requires_grad_()" if has_graph else "detach()"
    script = _BY_TORCH_FUNC.replace("parameter.detach()", f"parameter.{detached}")
    script = script.replace("value - 0.1 * gradients[name]", f"(value - 0.1 * gradients[name]).{detached}")
    (tmp_path / "train.py").write_text(script)
    refused = run_under("64MiB", tmp_path)
    assert refused.returncode == 3, refused.stderr
    named = re.search(r"the smallest feasible one is (.+?),", refused.stderr)
    assert named is not None, refused.stderr
    followed = run_under(named.group(1), tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert "within the budget" in followed.stderr


_EVALUATED_LATE = """
import torch
from torch import nn
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.ReLU())])
optimizer = torch.optim.Adam(model.parameters())
data = torch.randn(6144, 1024)
for step in range(4):
    optimizer.zero_grad()
    model(data[:64]).square().mean().backward()
    optimizer.step()
    if step == 2:
        with torch.inference_mode():
            model(data)
"""


def test_an_evaluation_that_the_plan_has_no_room_for_gets_another_one(tmp_path: Path) -> None:
    """GIVEN a budget with room for Adam's state, of 64 MiB WHEN much is evaluated at once THEN the state makes room."""
    (tmp_path / "train.py").write_text(_EVALUATED_LATE)
    refused = run_under("64MiB", tmp_path)
    named = re.search(r"the smallest feasible one is ([0-9.]+) MiB,", refused.stderr)
    assert named is not None, refused.stderr
    followed = run_under(f"{float(named.group(1)) + 85}MiB", tmp_path)
    assert "optimizer state to disk" not in followed.stderr.partition("an evaluation of 6144 samples at once")[0]
    assert "another one makes room for it" in followed.stderr
    assert followed.returncode == 0, followed.stderr
    assert json.loads((tmp_path / "run.json").read_text())["within_budget"]
