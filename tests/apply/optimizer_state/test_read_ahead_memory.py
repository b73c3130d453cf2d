"""A plan that reads state during backward keeps to its forecast: the same weights, in no more memory.

Each run is a process of its own; the meter is the process's own high-water mark.
"""

from pathlib import Path

import pytest
from processes import printed_by

from memwall.predict.malloc.tensor_heap import heap_unavailable_reason

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(heap_unavailable_reason()), reason=f"no tensor heap: {heap_unavailable_reason()}"),
]

_STATE_BYTES = 8 << 20
"""Of one weight of 1024 x 1024."""

# Every machine is to make the same plan: its disk counts as one of 0.3 GB/s, on which even a slow processor gains by
# reading ahead, and saved tensors stay.
_SCRIPT = """
import hashlib, json, sys
import msgspec, torch
from torch import nn
import memwall
from memwall.session import replanning as planning
from memwall.planning import located_search as placed_search

budget_bytes, disk, reads_ahead, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4]
make_plan, replace = planning.make_plan, msgspec.structs.replace
speed = {"disk_read_bytes_per_second": 3e8, "disk_write_bytes_per_second": 3e8}

def made(trace, settings):
    return make_plan(replace(trace, machine=replace(trace.machine, **speed)), settings)

planning.make_plan = made
placed_search.can_offload = lambda *_: "not in this test"
if not reads_ahead:
    placed_search.may_read_ahead = lambda *_: False

torch.set_num_threads(1)
torch.manual_seed(0)

class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(128, 1024) / 32) for _ in range(8))

    def forward(self, x):
        return nn.functional.linear(x, torch.cat(list(self.parts)))

def blocks(number):
    return [nn.Sequential(Joined() if kind == "joined" else nn.Linear(1024, 1024), nn.GELU()) for _ in range(number)]

middle = [nn.Linear(1024, 8192), nn.Linear(8192, 1024)] if kind == "large" else []
model = nn.Sequential(*blocks(4), *middle, *blocks(4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with memwall.fit(model, optimizer, budget=budget_bytes, disk=disk) as session:
    for step in range(3):
        x = torch.randn(1280, 1024, generator=torch.Generator().manual_seed(step))
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


@pytest.mark.parametrize("kind", ["equal", "large", "joined"])
def test_what_is_read_ahead_fits_beside_what_backward_has_left(kind: str, tmp_path: Path) -> None:
    """GIVEN equal weights, two larger than a bucket, or weights that are joined of parameters in each forward."""
    roomy = printed_by(_SCRIPT, 1 << 40, tmp_path, True, kind)
    budget_bytes = (roomy["smallest"] + roomy["plain"]) // 2
    runs = [printed_by(_SCRIPT, budget_bytes, tmp_path, True, kind)]
    assert runs[0]["ahead"]
    if kind == "equal":
        runs.append(printed_by(_SCRIPT, budget_bytes, tmp_path, False, kind))
        assert runs[1]["ahead"] == []
    assert roomy["ahead"] == []
    for run in runs:
        assert run["weights"] == roomy["weights"]
        assert run["overall"] <= budget_bytes
        assert abs(run["steady"] - run["predicted"]) <= run["margin"]
        # Whole parameters' state stays in memory, those of the first that fit.
        assert run["moved_per_step"] == pytest.approx(run["predicted_moved"], abs=_STATE_BYTES)
        assert run["replans"] == 0
