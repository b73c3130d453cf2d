"""A plan that lowers precision does so from its first step on, and gives the model back as it was."""

import pytest
import torch
from torch import Tensor, nn

from memwall.apply.applied import autocast_forward
from memwall.apply.fit import fit
from memwall.apply.session import Session
from memwall.errors import InfeasibleError
from memwall.plan.actions import Autocast
from memwall.plan.forecast import Forecast, PeakBytes
from memwall.plan.planfile import Plan
from memwall.plan.search import Settings
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace


def lower_precision(model: nn.Module) -> Plan:
    peak = PeakBytes(allocated_bytes=1, process_bytes=1)
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=1,
        margin_bytes=0,
        peak=peak,
        phases={},
        step_seconds=None,
        not_modelled=(),
        actions=(Autocast(dtype="bfloat16"),),
    )
    return Plan(
        model_fingerprint=fingerprint([model]), trace_hash="", micro_batch=2, num_micro_batches=1, forecast=forecast
    )


def small_model() -> tuple[nn.Module, list[torch.dtype]]:
    """A model, and the list of precisions its last layer answers in."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    return model, seen


def test_the_first_step_under_the_plan_is_in_lower_precision_already():
    model, seen = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(plan=lower_precision(model))
    session.attach(model, optimizer)
    with session:
        for _ in range(2):
            out: Tensor = model(torch.ones(2, 4))
            assert out.dtype is torch.float32
            out.sum().backward()
            optimizer.step()
    assert seen == [torch.bfloat16] * 2
    model(torch.ones(2, 4))
    assert seen[-1] is torch.float32
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("loop_ends_steps", [False, True])
def test_where_nothing_fits_the_next_step_is_recorded_in_lower_precision(
    monkeypatch: pytest.MonkeyPatch, loop_ends_steps: bool
):
    traces: list[Trace] = []

    def fits_in_lower_precision(trace: Trace, settings: Settings) -> Plan:
        traces.append(trace)
        if settings.autocast is None:
            raise InfeasibleError("no", budget_bytes=1, smallest_feasible_bytes=2)
        return lower_precision(model)

    monkeypatch.setattr("memwall.apply.planning.make_plan", fits_in_lower_precision)
    model, seen = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(model, optimizer, budget="1TiB", allow=["precision"]) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if loop_ends_steps:
                session.end_step()
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert [trace.autocast for trace in traces] == ["none", "bfloat16"]
    casts = [sum("_to_copy" in trace.names[op.name] for op in trace.steps[0].ops) for trace in traces]
    assert casts[0] == 0 < casts[1]


def test_a_call_that_fails_leaves_no_precision_behind():
    model, _ = small_model()
    model[0].register_forward_hook(lambda *_: 1 / 0)
    undo = []
    model.register_forward_pre_hook(lambda *_: undo.append(autocast_forward(model, "bfloat16", is_running=True)))
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    undo[0]()
    assert "forward" not in model.__dict__
