"""Parameters on disk in the step that is recorded: the trace of a plain step, and the same bits."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from streamed_models import GPT, KIB, everything, loss_of
from torch import nn

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace
from memwall.store.buckets import DiskSpace
from memwall.store.transfer import TransferPool
from memwall.trace.records import Step
from memwall.trace.trace_builder import TraceBuilder

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, num_micro: int) -> None:
    for micro in range(num_micro):
        (loss_of(model, 10 * number + micro) / num_micro).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def recorded(
    pool: TransferPool | None, num_micro: int, *, comes_back: bool = False
) -> tuple[Step, Any, dict[str, Any]]:
    """A step, the names of its operations, and what is left of it and of the step after it.

    Args:
        comes_back: parameters and gradients are in memory again before the optimizer's step.
    """
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    builder = TraceBuilder([model])
    if pool is None:
        builder.start_step(optimizer)
        train_step(model, optimizer, 0, num_micro)
        step = builder.finish_step(optimizer)
        train_step(model, optimizer, 1, num_micro)
        return step, builder.trace(optimizer).names, everything(model, optimizer)
    streaming = ParameterStreaming(model, ParameterTier(DiskPlace(pool), window_bytes=16 * KIB, min_bytes=4 * KIB))
    with torch._C.DisableTorchFunctionSubclass():
        builder.start_step(optimizer)
    streaming.tier.stands_for = builder.stands_for
    if comes_back:
        back = optimizer.register_step_pre_hook(lambda *_: streaming.undo())
        train_step(model, optimizer, 0, num_micro)
        back.remove()
        step = builder.finish_step(optimizer)
        return step, builder.trace(optimizer).names, everything(model, optimizer)
    state = OptimizerState(
        optimizer,
        DiskSpace(pool),
        resident_bytes=0,
        bucket_bytes=40 * KIB,
        min_bytes=4 * KIB,
        is_recorded=True,
        around_step=streaming.around_step,
    )
    train_step(model, optimizer, 0, num_micro)
    assert streaming.resident_bytes <= 8 * 32 * KIB
    with state.shown():
        step = builder.finish_step(optimizer)
    streaming.tier.stands_for = None
    state.end_recording()
    train_step(model, optimizer, 1, num_micro)
    names = builder.trace(optimizer).names
    state.undo()
    streaming.undo()
    return step, names, everything(model, optimizer)


def storages_of(step: Step, category: str) -> Counter[tuple[int, str, str, bool]]:
    """Per storage of a category: bytes, phase it was born in, whether it was there before, and whether it stays."""
    return Counter(
        (s.nbytes, s.phase, str(s.birth < 0), s.death >= len(step.ops)) for s in step.storages if s.category == category
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_micro", [1, 2], ids=["one batch", "two micro-batches"])
def test_a_step_with_parameters_on_disk_is_recorded_as_a_plain_one(num_micro: int, state_pool: TransferPool) -> None:
    plain, plain_names, plain_left = recorded(None, num_micro)
    streamed, names, left = recorded(state_pool, num_micro)
    assert [name for name, value in plain_left.items() if not torch.equal(left[name], value)] == []
    for category in ("parameter", "optimizer_state", "buffer", "gradient", "input"):
        assert storages_of(streamed, category) == storages_of(plain, category)
    assert in_forward(streamed, names) == in_forward(plain, plain_names)

    def names_in(step: Step, every: Any, phase: str) -> Counter[str]:
        found = Counter(every[op.name] for op in step.ops if op.phase == phase)
        del found["aten.detach.default"]  # which makes nothing
        return found

    # Autograd adds a further gradient to the one before it, which here is on disk.
    added = Counter({"aten.add_.Tensor": (num_micro - 1) * len(left_out(plain))})
    assert names_in(streamed, names, "backward") + added == names_in(plain, plain_names, "backward")
    assert names_in(streamed, names, "optimizer") == names_in(plain, plain_names, "optimizer")


def test_gradients_that_come_back_before_the_step_are_the_same_ones(state_pool: TransferPool) -> None:
    """As where the optimizer cannot be stepped in parts: the record knows no second set of them."""
    plain, _, _ = recorded(None, 1)
    returned, _, _ = recorded(state_pool, 1, comes_back=True)
    for category in ("gradient", "input", "temporary"):
        found, expected = (
            Counter(s.nbytes for s in step.storages if s.category == category and s.nbytes >= 4 * KIB)
            for step in (returned, plain)
        )
        assert found == expected


def in_forward(step: Step, names: Any) -> list[str]:
    return [names[op.name] for op in step.ops if op.phase in ("forward", "loss")]


def left_out(step: Step) -> list[int]:
    """Gradients that are large enough to leave."""
    return [s.nbytes for s in step.storages if s.category == "gradient" and s.nbytes >= 4 * KIB]


@pytest.mark.slow
def test_gradients_live_from_backward_to_the_end_of_the_step(
    state_pool: TransferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    original: Callable[..., None] = TraceBuilder.stands_for

    def watched(self: TraceBuilder, tensor: Any, like: Any) -> None:
        told.append((tensor.numel(), like.numel()))
        original(self, tensor, like)

    monkeypatch.setattr(TraceBuilder, "stands_for", watched)
    step, _, _ = recorded(state_pool, 1)
    gradients = [s for s in step.storages if s.category == "gradient" and s.nbytes >= 4 * KIB]
    assert len(told) == 2 * len(gradients)
    assert all(one == other for one, other in told)
    last = max(number for number, op in enumerate(step.ops) if op.phase == "optimizer")
    assert all(s.birth < last <= s.death for s in gradients)
