"""The end of a recorded step takes little: pages that its tensors have left go first, and its log holds things once."""

from typing import Any

import pytest
import torch
from torch import nn

import memwall
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.session.live_plan import LivePlan
from memwall.session.session import Session
from memwall.torch_internals.dispatch import active_dispatch_modes
from memwall.trace.step_recorder import StepRecorder
from memwall.trace.trace_builder import TraceBuilder

MIB = 1 << 20


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason="tensors have no heap of their own here")
def test_free_pages_are_returned_before_a_steps_records_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes: list[int] = []
    finish_step = TraceBuilder.finish_step

    def looked_at(builder: TraceBuilder, *args: Any, **options: Any) -> Any:
        heap = session._live.in_effect.allocator._heap
        assert heap is not None
        figures = heap.figures()
        free_bytes.append(figures.resident_bytes - figures.live_bytes)
        return finish_step(builder, *args, **options)

    monkeypatch.setattr(TraceBuilder, "finish_step", looked_at)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="64GiB") as session:
        model(torch.randn(2048, 64)).sum().backward()  # 16 MiB for each result of the first two
        optimizer.step()
    assert free_bytes == [0]


def test_saved_tensors_of_half_a_mebibyte_leave_while_a_step_is_recorded() -> None:
    """GIVEN 24 layers that each save little THEN the first step has room for all of them: it runs under no plan yet."""
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="64GiB") as session:
        for _ in range(2):
            model(torch.randn(512, 256)).sum().backward()  # 512 KiB for each result
            optimizer.step()
    assert session.measured.first_step_bytes_to_tier == 25 * MIB // 2  # the batch, and each result of Tanh


def test_equal_names_and_shapes_of_a_log_are_there_once() -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    recorder = StepRecorder([model])
    recorder.start()
    model(torch.randn(400, 300)).sum().backward()
    log = recorder.finish(None)
    for values in (
        [op.name for op in log.ops],
        [storage.device for storage in log.storages],
        [storage.dtype for storage in log.storages],
        [storage.shape for storage in log.storages],
    ):
        assert len(set(map(id, values))) == len(set(values))


def test_a_recording_that_ends_within_inference_mode_leaves_operations_as_they_were() -> None:
    """torch's inference mode puts back, at its end, the mark that a mode watches, and fails where none does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="64GiB") as session:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                model(torch.randn(4, 8))
            with torch.autograd.profiler.record_function("loading"):  # an operator without a tensor
                batch = torch.randn(4, 8)
        model(batch).sum().backward()
        assert session.state == "running"
        assert active_dispatch_modes() == []
        optimizer.step()
        with torch.inference_mode():
            model(batch)
    assert active_dispatch_modes() == []


def test_a_plan_is_made_and_applied_out_of_an_evaluations_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that a plan moves would otherwise be tensors of that mode, which autograd does not save."""
    seen: list[bool] = []
    make = LivePlan.make

    def watched(live: LivePlan) -> bool:
        seen.append(torch.is_inference_mode_enabled())
        return make(live)

    monkeypatch.setattr(LivePlan, "make", watched)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="64GiB"):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            model(torch.randn(4, 8))
            assert torch.is_inference_mode_enabled()
    assert seen == [False]


def test_one_step_without_an_optimizer_is_enough_to_plan_from() -> None:
    """GIVEN a loop that changes parameters itself WHEN its second step begins THEN a plan stands."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    session = Session(budget_bytes=1 << 40)
    session.attach(model, None, is_stepped_by_hand=True)
    seen = []
    with session:
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            seen.append(session.plan is not None)
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    assert seen == [False, True, True]
