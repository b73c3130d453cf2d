"""A plan that reads state during backward keeps to its forecast: the same weights, in no more memory.

Each run is a process of its own; the meter is the process's own high-water mark.
"""

from pathlib import Path

import pytest
from processes import printed_by

from memwall.predict.tensor_heap import heap_unavailable_reason

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(heap_unavailable_reason()), reason=f"no tensor heap: {heap_unavailable_reason()}"),
]

# Every machine is to make the same plan: its disk counts as one of 1 GB/s, and saved tensors stay.
_SCRIPT = """
import hashlib, json, sys
import msgspec, torch
from torch import nn
import memwall
from memwall.apply import planning
from memwall.plan import placed_search

budget_bytes, disk, reads_ahead = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
make_plan, replace = planning.make_plan, msgspec.structs.replace
speed = {"disk_read_bytes_per_second": 1e9, "disk_write_bytes_per_second": 1e9}

def made(trace, settings):
    return make_plan(replace(trace, machine=replace(trace.machine, **speed)), settings)

planning.make_plan = made
placed_search.can_offload = lambda *_: "not in this test"
if not reads_ahead:
    placed_search.may_read_ahead = lambda *_: False

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with memwall.fit(model, optimizer, budget=budget_bytes, disk=disk) as session:
    for step in range(4):
        x = torch.randn(1536, 1024, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
forecast, measured = session.plan.forecast, session.measured
weights = hashlib.sha256()
for parameter in model.parameters():
    weights.update(parameter.detach().numpy().data)
print(json.dumps({
    "smallest": forecast.smallest_feasible_budget_bytes,
    "plain": forecast.plain_peak.process_bytes,
    "ahead": [
        one.buffer_bytes
        for action in forecast.actions if type(action).__name__ == "OptimizerPlacement"
        for one in action.steps_ahead
    ],
    "kinds": sorted({type(action).__name__ for action in forecast.actions}),
    "predicted": forecast.phases["steady_step"].process_bytes,
    "margin": forecast.margin_bytes,
    "steady": measured.peak_bytes,
    "overall": measured.overall_peak_bytes,
    "moved_per_step": (measured.bytes_to_tier - measured.first_step_bytes_to_tier) / (measured.num_steps - 1),
    "predicted_moved": forecast.moved_bytes_per_step,
    "replans": measured.num_replans,
    "seconds": measured.step_seconds,
    "weights": weights.hexdigest(),
}))
"""


def test_what_is_read_ahead_fits_beside_what_backward_has_left(tmp_path: Path) -> None:
    roomy = printed_by(_SCRIPT, 1 << 40, tmp_path, True)
    budget_bytes = (roomy["smallest"] + roomy["plain"]) // 2
    early, late = (printed_by(_SCRIPT, budget_bytes, tmp_path, reads_ahead) for reads_ahead in (True, False))
    assert early["ahead"]
    assert late["ahead"] == roomy["ahead"] == []
    assert early["weights"] == late["weights"] == roomy["weights"]
    for run in (early, late):
        assert run["overall"] <= budget_bytes
        assert abs(run["steady"] - run["predicted"]) <= run["margin"]
        assert run["moved_per_step"] == pytest.approx(run["predicted_moved"], rel=0.05)
        assert run["replans"] == 0
