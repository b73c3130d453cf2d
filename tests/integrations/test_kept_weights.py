"""A loop that keeps a copy of its best weights, long after its plan was made, stays within the budget it was told."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_SCRIPT = """
import copy, hashlib
import torch
from torch import nn
kinds = nn.Tanh, nn.Sigmoid, nn.Tanh, nn.Sigmoid
model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), *[kind() for kind in kinds]) for _ in range(12)])
optimizer = torch.optim.Adam(model.parameters())
best = None
for epoch in range(2):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(1024, 1024)).square().mean().backward()
        optimizer.step()
    best = KEPT
model.load_state_dict(best if isinstance(best, dict) else best.state_dict())
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
_KINDS = {
    "a state dict": ("copy.deepcopy(model.state_dict())", 'copy.deepcopy(getattr(model, "state_" + "dict")())'),
    "a model": ("copy.deepcopy(model)", "copy.deepcopy(*[model])"),
}
"""These are kept: each as a text says it, and as none does."""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return warm_python().run(*arguments, "train.py", folder=folder, timeout_s=110)


def run_under(budget: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return run(folder, "-m", "memwall", "run", "--budget", budget, "--no-disk", "--report", "run.json")


@pytest.mark.parametrize("kind", _KINDS)
def test_the_number_that_is_told_has_room_for_a_copy_that_the_script_is_going_to_keep(
    kind: str, tmp_path: Path
) -> None:
    """GIVEN a copy that the script's text says WHEN the refusal is followed THEN no plan has to be made again.

    GIVEN one that no text says, under the same budget, THEN the next step is planned with it before it runs.
    """
    said, unsaid = _KINDS[kind]
    (tmp_path / "train.py").write_text(_SCRIPT.replace("KEPT", said))
    plain = run(tmp_path)
    refused = run_under("64MiB", tmp_path)
    assert refused.returncode == 3, refused.stderr
    assert "a copy of the weights, 48.0 MiB, which train.py:14 keeps, is in that too" in refused.stderr
    named = re.search(r"the smallest feasible one is (.+?),", refused.stderr)
    assert named is not None, refused.stderr
    for kept, num_replans in ((said, 0), (unsaid, 1)):
        (tmp_path / "train.py").write_text(_SCRIPT.replace("KEPT", kept))
        followed = run_under(named.group(1), tmp_path)
        assert followed.returncode == 0, followed.stderr
        measured = json.loads((tmp_path / "run.json").read_text())["measured"]
        assert measured.get("num_replans", 0) == num_replans
        assert ("the script has come to keep 48.0 MiB of copies of its weights; a new plan" in followed.stderr) == bool(
            num_replans
        )
        assert followed.stdout == plain.stdout
