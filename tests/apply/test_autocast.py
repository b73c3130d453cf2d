"""A plan that lowers precision does so from its first step on, and gives the model back as it was."""

from typing import Literal

import pytest
import torch
from combinations import every_value
from plans import plan_of
from torch import Tensor, nn

from memwall.apply.precision import LowerPrecision, lower_dtype
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.planning.techniques.autocast import Autocast
from memwall.session.fit import fit
from memwall.session.session import Session
from memwall.trace.records import Trace


def lower_precision(model: nn.Module, dtype: Literal["bfloat16", "float16"] = "bfloat16") -> Plan:
    return plan_of(model, Autocast(dtype=dtype), micro_batch=2)


def small_model() -> tuple[nn.Module, list[torch.dtype]]:
    """A model, and the list of precisions its last layer answers in."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    return model, seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_first_step_under_the_plan_is_in_lower_precision_already(dtype: Literal["bfloat16", "float16"]):
    model, seen = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(plan=lower_precision(model, dtype))
    session.attach(model, optimizer)
    with session:
        for _ in range(2):
            out: Tensor = model(torch.ones(2, 4))
            assert out.dtype is torch.float32
            out.sum().backward()
            optimizer.step()
    assert seen == [getattr(torch, dtype)] * 2
    model(torch.ones(2, 4))
    assert seen[-1] is torch.float32
    assert "forward" not in model.__dict__


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "loop_ends_steps"), every_value(["bfloat16", "float16"], [False, True]))
def test_where_nothing_fits_the_next_step_is_recorded_in_the_devices_lower_precision(
    monkeypatch: pytest.MonkeyPatch, loop_ends_steps: bool, dtype: Literal["bfloat16", "float16"]
):
    monkeypatch.setattr("memwall.apply.techniques.autocast.lower_dtype", lambda device_type: dtype)
    traces: list[Trace] = []

    def fits_in_lower_precision(search: RecordingSearch) -> Plan | None:
        traces.append(search.trace)
        return lower_precision(model, dtype) if search.settings.standing else None

    monkeypatch.setattr("memwall.session.first_plan.found_by", fits_in_lower_precision)
    model, seen = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(model, optimizer, budget="1TiB", allow=["precision"]) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if loop_ends_steps:
                session.end_step()
    lower = getattr(torch, dtype)
    assert seen == [torch.float32, lower, lower]
    assert [trace.autocast for trace in traces] == ["none", dtype]
    casts = [sum("_to_copy" in trace.names[op.name] for op in trace.steps[0].ops) for trace in traces]
    assert casts[0] == 0 < casts[1]


def test_a_call_that_fails_leaves_no_precision_behind():
    model, _ = small_model()
    model[0].register_forward_hook(lambda *_: 1 / 0)
    undo = []
    model.register_forward_pre_hook(lambda *_: undo.append(LowerPrecision(model, "bfloat16", is_running=True).undo))
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    undo[0]()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(("is_supported", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_device_that_cannot_compute_in_bfloat16_gets_float16(
    monkeypatch: pytest.MonkeyPatch, is_supported: bool, dtype: str
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: is_supported)
    assert lower_dtype("cuda") == dtype
    assert lower_dtype("cpu") == "bfloat16"
