"""A script of two optimizers stays within the smallest budget it is told, and that has the state of both on disk."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_MIB = 1 << 20
_STATE_MIB = 128
_SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
optimizers = [torch.optim.Adam(part.parameters(), lr=1e-4) for part in (model[:4], model[4:])]
for step in range(4):
    model(torch.randn(64, 1024)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print([parameter.double().sum().item() for parameter in model.parameters()])
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return warm_python().run(*arguments, "train.py", folder=folder, timeout_s=110)


def run_under(budget: str, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    return run(folder, "-m", "memwall", "run", "--budget", budget, "--report", "run.json", *more)


def told(refused: "subprocess.CompletedProcess[str]") -> float:
    assert refused.returncode == 3, refused.stderr
    named = re.search(r"the smallest feasible one is ([\d.]+) MiB,", refused.stderr)
    assert named is not None, refused.stderr
    return float(named.group(1))


def test_the_number_that_is_told_counts_on_the_disk_for_the_state_of_both(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    plain = run(tmp_path)
    in_memory_mib, least_mib = told(run_under("64MiB", tmp_path, "--no-disk")), told(run_under("64MiB", tmp_path))
    # Between steps there is room for two copies of the weights, which are as much as the state.
    assert least_mib < in_memory_mib - _STATE_MIB / 4
    followed = run_under(f"{least_mib}MiB", tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout == plain.stdout
    measured = json.loads((tmp_path / "run.json").read_text())["measured"]
    assert measured["peak"]["process_bytes"] <= least_mib * _MIB
    assert measured["bytes_moved_per_step"] > _STATE_MIB / 2 * _MIB
