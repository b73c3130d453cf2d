"""A budget below parameters, gradients and optimizer state: a script that knows nothing of it keeps to it, to the bit.

Each run is a process of its own; the meter is the process's own high-water mark.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

from memwall.predict.malloc.tensor_heap import heap_unavailable_reason

pytestmark = [
    pytest.mark.timeout(540),
    pytest.mark.skipif(bool(heap_unavailable_reason()), reason=f"no tensor heap: {heap_unavailable_reason()}"),
]
MIB = 1 << 20
WEIGHT_BYTES = 24 * 1024 * 1024 * 4

_SCRIPT = """
import hashlib, sys
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(step))
    (model(x) - x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
found = hashlib.sha256()
for parameter in model.parameters():
    found.update(parameter.detach().numpy().data)
print("weights", found.hexdigest())
"""

# What is the smallest budget with parameters on disk, and what without?
_PROBE = """
import json, runpy, sys
from memwall.session.session import Session
from memwall.errors import InfeasibleError
from memwall.integrations.launcher import run_script
from memwall.planning import search
from memwall.planning.settings import Settings
from memwall.planning.techniques import parameters

session = Session(budget_bytes=1 << 20, disk=sys.argv[2])
found = {}
try:
    run_script(sys.argv[1], [], session)
except InfeasibleError as error:
    found["with"] = error.smallest_feasible_bytes
parameters.TECHNIQUE.locations = lambda *_: "they stay here"
try:
    search.make_plan(session.trace, Settings(budget_bytes=1 << 20))
except InfeasibleError as error:
    found["without"] = error.smallest_feasible_bytes
print(json.dumps(found))
"""


def output_of(*command: str, cwd: Path) -> str:
    """What a Python process prints."""
    done = warm_python().run(*command, folder=cwd, timeout_s=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_script_keeps_to_a_budget_that_has_no_room_for_gradients_beside_parameters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    (plain,) = output_of("train.py", cwd=tmp_path).splitlines()
    smallest = json.loads(output_of("-c", _PROBE, "train.py", str(tmp_path), cwd=tmp_path).splitlines()[-1])
    assert smallest["with"] < smallest["without"] - 0.5 * WEIGHT_BYTES
    budget_bytes = smallest["with"] + (smallest["without"] - smallest["with"]) // 3

    options = ("--budget", str(budget_bytes), "--disk", str(tmp_path), "--report", "run.json")
    planned = output_of("-m", "memwall", "run", *options, "train.py", cwd=tmp_path)
    assert plain in planned.splitlines()
    run: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    forecast = run["forecast"]
    kinds = [action["kind"] for action in forecast["actions"]]
    assert kinds[:2] == ["parameter-placement", "optimizer-placement"]
    assert run["within_budget"]
    # The first step too: it never had all gradients in memory beside the parameters.
    assert run["measured"]["first_step_peak_bytes"] < smallest["without"] - 0.5 * WEIGHT_BYTES
    predicted_bytes = forecast["phases"]["steady_step"]["process_bytes"]
    assert abs(run["measured"]["steady_peak_bytes"] - predicted_bytes) <= forecast["margin_bytes"]
    assert run["measured"]["num_replans"] == 0
    # What the script itself reads by `detach` is not written again.
    moved_bytes = run["measured"]["bytes_moved_per_step"] - forecast["moved_bytes_per_step"]
    assert abs(moved_bytes) <= 0.01 * WEIGHT_BYTES


@pytest.mark.slow
def test_a_script_whose_model_does_not_fit_is_built_trained_and_saved_within_the_budget(tmp_path: Path) -> None:
    """GIVEN weights that have no room beside the process WHEN a script builds, trains, saves them THEN as plainly."""
    script = tmp_path / "train.py"
    saving = "torch.save(model.state_dict(), sys.argv[1])\n"
    script.write_text(_SCRIPT.replace("range(24)", "range(36)").replace("range(3)", "range(2)") + saving)
    for name in ("plain", "planned"):
        (tmp_path / name).mkdir()
    (plain,) = output_of("train.py", "plain/weights.pt", cwd=tmp_path).splitlines()
    weight_bytes = WEIGHT_BYTES * 36 // 24
    budget_bytes = 340 * MIB + weight_bytes // 2

    options = ("--budget", str(budget_bytes), "--disk", str(tmp_path), "--report", "run.json")
    planned = output_of("-m", "memwall", "run", *options, "train.py", "planned/weights.pt", cwd=tmp_path)
    assert plain in planned.splitlines()
    assert (tmp_path / "planned/weights.pt").read_bytes() == (tmp_path / "plain/weights.pt").read_bytes()
    run: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    built = run["forecast"]["phases"]["build"]
    assert built["process_bytes"] - built["allocated_bytes"] + weight_bytes > budget_bytes
    assert run["within_budget"]
    assert run["measured"]["peak"]["process_bytes"] < budget_bytes
