"""A budget below what the optimizer's state alone makes of a run: met as predicted, with the same weights at the end.

Each run is a process of its own; the meter is the process's own high-water mark.
"""

from pathlib import Path
from typing import Any

import pytest
from warm_python import printed_by

from memwall.predict.malloc.tensor_heap import heap_unavailable_reason

pytestmark = [
    pytest.mark.timeout(540),
    pytest.mark.skipif(bool(heap_unavailable_reason()), reason=f"no tensor heap: {heap_unavailable_reason()}"),
]
MIB = 1 << 20

_SCRIPT = """
import hashlib, json, sys
import torch
from torch import nn
import memwall
from memwall.errors import InfeasibleError
from memwall.planning import search
from memwall.planning.settings import Settings
from memwall.planning.techniques import optimizer_state
from memwall.planning.planfile import Plan

mode, number, disk, width = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

model, optimizer = make()

def train(num_steps, *, after_first=None):
    for step in range(num_steps):
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and after_first is not None:
            after_first()

def weights():
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().data)
    return found.hexdigest()

def smallest(trace, budget_bytes):
    try:
        search.make_plan(trace, Settings(budget_bytes=budget_bytes))
    except InfeasibleError as error:
        return error.smallest_feasible_bytes
    raise SystemExit(f"{budget_bytes} bytes are feasible")

out = {}
if mode == "probe":
    session = memwall.fit(model, optimizer, budget=1 << 20, disk=disk)
    try:
        train(1, after_first=session.end_step)
    except InfeasibleError as error:
        out["with"] = error.smallest_feasible_bytes
    optimizer_state.TECHNIQUE.locations = lambda *_: ()
    out["without"] = smallest(session.trace, 1 << 20)
    session.close()
    model, optimizer = make()
    train(3)
else:
    given = {"budget": int(number)} if mode == "budget" else {"plan": Plan.load(number)}
    with memwall.fit(model, optimizer, disk=disk, **given) as session:
        train(3)
    if mode == "budget":
        session.plan.save(f"{disk}/plan.json")
    measured, forecast = session.measured, session.plan.forecast
    out |= {
        "kinds": [type(action).__name__ for action in session.plan.actions],
        "predicted": forecast.phases["steady_step"].process_bytes,
        "margin": forecast.margin_bytes,
        "steady": measured.peak_bytes,
        "first": measured.first_step_peak_bytes,
        "overall": measured.overall_peak_bytes,
        "seconds": measured.step_seconds,
        "predicted_seconds": forecast.step_seconds,
        "predicted_moved": forecast.moved_bytes_per_step,
        "moved_per_step": (measured.bytes_to_tier - measured.first_step_bytes_to_tier) / (
            measured.num_steps - (mode == "budget")
        ),
        "moved": [measured.bytes_to_tier, measured.bytes_from_tier],
        "replans": measured.num_replans,
    }
print(json.dumps(out | {"weights": weights()}))
"""


def in_a_process(mode: str, tmp_path: Path, number: int | Path = 0, width: int = 768) -> Any:
    """What one run prints."""
    return printed_by(_SCRIPT, mode, number, tmp_path, width)


@pytest.mark.slow
def test_a_budget_that_is_infeasible_without_it_is_kept_with_the_same_weights(tmp_path: Path) -> None:
    probe = in_a_process("probe", tmp_path)
    state_bytes = 2 * 16 * 768 * 768 * 4
    assert probe["with"] < probe["without"] - 0.4 * state_bytes
    budget_bytes = probe["with"] + (probe["without"] - probe["with"]) // 3

    run = in_a_process("budget", tmp_path, budget_bytes)
    assert "OptimizerPlacement" in run["kinds"]
    assert run["weights"] == probe["weights"]
    # The first step too, which makes the state: it never had all of it in memory.
    assert run["overall"] <= budget_bytes
    assert run["first"] < probe["without"] - 0.2 * state_bytes
    assert abs(run["steady"] - run["predicted"]) <= run["margin"]
    assert run["replans"] == 0
    assert run["moved_per_step"] == pytest.approx(run["predicted_moved"], rel=0.05)

    # The same plan from the first step on: now no step has all of the state in memory.
    planned = in_a_process("plan", tmp_path, tmp_path / "plan.json")
    assert planned["weights"] == probe["weights"]
    assert planned["overall"] <= budget_bytes
    assert planned["moved_per_step"] == pytest.approx(planned["predicted_moved"], rel=0.05)
