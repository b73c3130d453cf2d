"""Optimizer state that is spilled in the step that is recorded: the trace of a plain step, and the same bits."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import every_value
from optimizer_runs import OPTIMIZERS, Net, are_equal, in_groups, resident_state_bytes, train_step

import memwall
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.optimizer_state import state_keeper
from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.open_state import can_place
from memwall.apply.optimizer_state.recorded import RecordedState
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.store.transfer import TransferPool
from memwall.trace.records import Step
from memwall.trace.trace_builder import TraceBuilder

KIB = 1 << 10
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


# The recorded step.


def recorded_step(make: Callable[..., Any], keep: Callable[..., OptimizerState] | None, *, begin: int = 0) -> Any:
    """The record of step `begin`, with its state on disk in between if there is a keeper; the model, the optimizer."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    for step in range(begin):
        train_step(model, optimizer, step)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    state = keep(optimizer, is_recorded=True) if keep is not None else None
    train_step(model, optimizer, begin)
    if state is not None:
        with state.shown():
            step_record = builder.finish_step(optimizer)
    else:
        step_record = builder.finish_step(optimizer)
    return step_record, builder.trace(optimizer), model, optimizer, state


def storages_of(step: Step, category: str) -> list[tuple[int, str, int, bool]]:
    """Per storage of a category: bytes, device, whether it was there before, whether it stays."""
    return sorted(
        (s.nbytes, s.device, min(s.birth, 0), s.death >= len(step.ops)) for s in step.storages if s.category == category
    )


@pytest.mark.parametrize(
    ("name", "begin"),
    every_value(
        ["adamw for-loop", "adam amsgrad", "sgd for-loop", "adamw fused", "Adafactor"],
        {"its first step": 0, "a later step": 2},
    ),
)
def test_a_step_that_spills_its_state_is_recorded_as_a_plain_one(
    name: str, begin: int, keep: Callable[..., OptimizerState]
) -> None:
    plain, plain_trace, plain_model, plain_optimizer, _ = recorded_step(OPTIMIZERS[name], None, begin=begin)
    spilled, trace, model, optimizer, _ = recorded_step(OPTIMIZERS[name], keep, begin=begin)
    assert are_equal((plain_model, plain_optimizer.state_dict()["state"]), (model, optimizer.state_dict()["state"]))
    for category in ("optimizer_state", "parameter", "gradient", "buffer"):
        assert storages_of(spilled, category) == storages_of(plain, category)
    assert all(s.death >= len(spilled.ops) for s in spilled.storages if s.category == "optimizer_state")
    if "fused" not in name:  # which is one operation for all parameters, or one for each bucket
        assert sorted(trace.names[op.name] for op in spilled.ops) == sorted(
            plain_trace.names[op.name] for op in plain.ops
        )
    assert spilled.kind == plain.kind
    if name != "Adafactor":  # whose state is small
        assert resident_state_bytes(optimizer) == 0


def test_memory_of_spilled_state_is_given_up_while_its_step_is_recorded(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    put = RecordedState.put_away

    def watched(recorded: RecordedState, bucket: Any, entries: Any) -> None:
        put(recorded, bucket, entries)
        seen.append(sum(one.tensor.untyped_storage().nbytes() for some in recorded._emptied.values() for one in some))

    monkeypatch.setattr(RecordedState, "put_away", watched)
    recorded_step(OPTIMIZERS["adamw for-loop"], keep)
    assert len(seen) > 2
    assert set(seen) == {0}


def test_after_a_recorded_step_training_goes_on_from_disk_to_the_same_bits(
    keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    found = []
    for keeper in (None, keep):
        _, _, model, optimizer, state = recorded_step(make, keeper)
        if state is not None:
            state.end_recording()
        for step in (1, 2):
            train_step(model, optimizer, step)
        found.append((model, optimizer.state_dict()["state"]))
    assert are_equal(*found)
    assert state_pool.bytes_read > 0


def test_two_optimizer_steps_in_one_recording_find_the_state_they_made(keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_spilled in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        builder = TraceBuilder([model])
        builder.start_step(optimizer)
        if is_spilled:
            keep(optimizer, is_recorded=True)
        model(torch.ones(5, 32), 0).square().mean().backward()
        optimizer.step()
        optimizer.step()
        builder.cancel_step()
        found.append((model, optimizer.state_dict()["state"]))
    assert are_equal(*found)


def test_a_second_recording_shows_the_state_that_the_first_one_spilled(keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_spilled in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        state = keep(optimizer, is_recorded=True) if is_spilled else None
        steps = []
        for number in (0, 2):
            builder = TraceBuilder([model])
            with nullcontext() if state is None else state.shown():
                builder.start_step(optimizer)
            train_step(model, optimizer, number)
            with nullcontext() if state is None else state.shown():
                steps.append(builder.finish_step(optimizer))
        found.append((steps, model, optimizer.state_dict()["state"]))
    (plain, *learnt), (spilled, *again) = found
    assert are_equal(tuple(learnt), tuple(again))
    assert [step.kind for step in spilled] == ["first", "steady"]
    for one, other in zip(plain, spilled, strict=True):
        assert storages_of(one, "optimizer_state") == storages_of(other, "optimizer_state")


@pytest.mark.slow
def test_a_session_spills_state_that_was_loaded_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_keeper, "lacks_room", lambda *_: True)
    for where in ("memwall.session.recorded_step", "memwall.apply.optimizer_state.state_keeper"):
        monkeypatch.setattr(f"{where}.MIN_STATE_BYTES", KIB)
    found = []
    resident: list[int] = []
    for is_fitted in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, 0)
        with (
            memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path)) if is_fitted else nullcontext() as session
        ):
            for step in (1, 2, 3):
                x = torch.ones(5, 32) * step
                model(x, step).square().mean().backward()
                if is_fitted and step == 1:
                    resident.append(resident_state_bytes(optimizer))
                optimizer.step()
                optimizer.zero_grad()
        found.append((model, optimizer.state_dict()["state"]))
    assert are_equal(*found)
    assert resident == [0]
    assert session.trace is not None
    (step_record,) = session.trace.steps
    assert step_record.kind == "steady"
    sizes = [s.nbytes for s in step_record.storages if s.category == "optimizer_state" and s.nbytes >= KIB]
    assert sum(sizes) == resident_state_bytes(optimizer)
    assert not session._live.in_effect.keeper.is_away


# When the recorded step spills.


class Meter:
    """Stands for the process: what it holds now, and after free memory has been returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: int, trimmed: int) -> None:
        self.now = now
        self.trimmed = trimmed
        monkeypatch.setattr("memwall.apply.optimizer_state.room_for_state.process_bytes", lambda: self.now)

    def trim(self) -> None:
        self.now = self.trimmed


@pytest.mark.parametrize(
    ("now", "trimmed", "is_away"),
    [(100 << 20, 100 << 20, False), (300 << 20, 100 << 20, False), (300 << 20, 250 << 20, True)],
    ids=["there is room", "there is room once free pages are returned", "there is none"],
)
def test_state_is_spilled_where_the_budget_has_no_room_for_it(
    now: int, trimmed: int, is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1 << 20))])
    keeper, meter = StateKeeper(str(tmp_path), None), Meter(monkeypatch, now, trimmed)
    # 8 MiB of state, twice 4 MiB of temporaries, 16 MiB to spare.
    assert keeper.spill_recorded([optimizer], meter, budget_bytes=280 << 20) == is_away  # type: ignore[arg-type]
    assert keeper.is_away == is_away
    keeper.bring_back()


@pytest.mark.slow
def test_what_cannot_be_spilled_stays_in_memory(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 16))]
    lbfgs = torch.optim.LBFGS(parameters)
    assert not can_place(lbfgs)
    assert not StateKeeper(str(tmp_path), None).spill_recorded([lbfgs], AllocatorHandler(), budget_bytes=1)
    adamw = torch.optim.AdamW(parameters)
    assert can_place(adamw)
    assert can_place(None)
    assert not StateKeeper(str(tmp_path / "none"), None).spill_recorded([adamw], AllocatorHandler(), budget_bytes=1)
    assert not StateKeeper(str(tmp_path), 4096).spill_recorded([adamw], AllocatorHandler(), budget_bytes=1)
