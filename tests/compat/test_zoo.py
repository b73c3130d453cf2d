"""The number that a refusal names is kept by each family of the zoo: build, steps, evaluation and saving are in it."""

import json
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
from prediction_zoo import FAMILIES, OPTIMIZERS, PRECISIONS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Each optimizer is of two families. In bfloat16 oneDNN keeps the code that it compiles for each shape, and experts have
# another number of tokens in each step: plain torch then grows by 20 MiB a step.
CASES = [
    (family, optimizer, PRECISIONS[(number + number // 6) % len(PRECISIONS)] if family != "mixtral" else "float32")
    for number, (family, optimizer) in enumerate(zip(FAMILIES, cycle(OPTIMIZERS), strict=False))
]
SCRIPT = """
import sys
import torch
sys.path.append({benchmarks!r})
from prediction_zoo import workload
case = workload({family!r}, {optimizer!r}, {precision!r})
model = case.model()
optimizer = case.optimizer(model.parameters())
for epoch in range(2):
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        case.loss(model, case.batch()).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        case.loss(model, case.batch())
    torch.save([model.state_dict(), optimizer.state_dict()], "saved.pt")
"""


def run_under(budget: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "memwall", "run", "--budget", budget, "--report", "run.json", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("family", "optimizer", "precision"), CASES, ids=[case[0] for case in CASES])
def test_the_budget_that_a_refusal_names_is_kept(family: str, optimizer: str, precision: str, tmp_path: Path) -> None:
    script = SCRIPT.format(benchmarks=str(BENCHMARKS), family=family, optimizer=optimizer, precision=precision)
    (tmp_path / "train.py").write_text(script)
    refused = run_under("64MiB", tmp_path)
    assert refused.returncode == 3, refused.stderr
    named = re.search(r"the smallest feasible one is (.+?),", refused.stderr)
    assert named is not None, refused.stderr
    followed = run_under(named.group(1), tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert json.loads((tmp_path / "run.json").read_text())["within_budget"]
