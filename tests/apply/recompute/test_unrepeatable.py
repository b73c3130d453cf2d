"""Recomputed blocks whose state cannot be put back: they are named, and are not recomputed."""

import copy
import itertools
import logging
from typing import Any

import hidden_state
import pytest
import torch
from hidden_state import Block, MeanInPlace, ReadsAGlobal, assert_same, trained, under
from plans import plan_of
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from memwall.apply.blocks.held_values import MAX_CLONED_BYTES
from memwall.errors import ApplyError
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_block_that_cannot_be_repeated_is_not_recomputed_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Block(), ReadsAGlobal())
    treated = copy.deepcopy(plain)
    without_2 = itertools.chain((1,), itertools.count(3))  # 2 is the second run's, which proves the first
    monkeypatch.setattr(hidden_state, "CLOCK", without_2)
    expected = trained(plain)
    monkeypatch.setattr(hidden_state, "CLOCK", itertools.count(1))
    with under(treated, Recompute(block="0"), Recompute(block="1")) as executor, caplog.at_level(logging.WARNING):
        assert_same(trained(treated), expected)
        assert executor.wrapped("0")[1].dropped == ""
        assert executor.wrapped("1")[1].num_runs == 3
        reason = executor.wrapped("1")[1].dropped
    assert "outside of the module" in reason
    assert [record.message for record in caplog.records] == [f"'1' keeps what it saves and is not recomputed: {reason}"]


class _AttentionWithoutDropout(torch.autograd.Function):
    """Saves a seed and an offset that nothing has written, as CUDA's attention does."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, left_by_others: int) -> Tensor:
        seed = torch.full((), left_by_others, dtype=torch.int64)
        ctx.save_for_backward(x, seed, seed.view(torch.uint64), torch.full((2,), left_by_others).view(torch.uint64))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0].cos(), None


def test_a_seed_of_attention_without_dropout_is_no_difference() -> None:
    """GIVEN attention whose seed and offset are never written WHEN its block runs again THEN that is no obstacle."""

    class Attention(Block):
        written = itertools.count(1)

        def between(self, y: Tensor) -> Tensor:
            return _AttentionWithoutDropout.apply(y, next(self.written))

    plain = nn.Sequential(Attention())
    treated = copy.deepcopy(plain)
    expected = trained(plain)
    with under(treated, Recompute(block="0")) as executor:
        assert_same(trained(treated), expected)
        assert executor.wrapped("0")[1].dropped == ""


def test_a_session_goes_on_and_says_which_block_is_not_recomputed() -> None:
    model = nn.Sequential(Block(), ReadsAGlobal(), nn.Tanh())
    plan = plan_of(model, Recompute(block="0"), Recompute(block="1"))
    with Session(plan=plan) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.attach(model, optimizer)
        for _ in range(3):
            model(torch.ones(5, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.num_steps == 3
    assert list(session.measured.lost) == [("recompute", "1")]


def test_a_second_run_that_fails_leaves_a_plain_step(caplog: pytest.LogCaptureFixture) -> None:
    class Once(Block):
        seen: set[int] = set()  # noqa: RUF012 - shared by all on purpose

        def between(self, y: Tensor) -> Tensor:
            if y.dim() in self.seen:
                raise KeyError("seen")
            self.seen.add(y.dim())
            return y

    plain = nn.Sequential(Once())
    treated = copy.deepcopy(plain)
    expected = trained(plain, num_steps=1)
    Once.seen.clear()
    with under(treated, Recompute(block="0")), caplog.at_level(logging.WARNING):
        assert_same(trained(treated, num_steps=1), expected)
    assert "'0' keeps what it saves and is not recomputed" in caplog.text
    assert "the second run ends in KeyError: 'seen'" in caplog.text


def test_a_large_tensor_that_is_written_in_place_is_named_as_the_cause() -> None:
    class Large(MeanInPlace):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(MAX_CLONED_BYTES // 4 // 24 + 1, 24)

        def between(self, y: Tensor) -> Tensor:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return y - self.mean[0].clone()

    torch.manual_seed(1)
    plain = nn.Sequential(Large())
    treated = copy.deepcopy(plain)
    expected = trained(plain)
    with under(treated, Recompute(block="0")) as executor:
        assert_same(trained(treated), expected)
        assert "it writes into mean (1.0 MiB)" in executor.wrapped("0")[1].dropped
    assert torch.equal(treated[0].mean, plain[0].mean)


def test_a_global_that_changes_before_backward_ends_the_run() -> None:
    """In the first step, where it can be known; no gradient of the block comes out."""
    factor = [2.0]

    class Scaled(Block):
        def between(self, y: Tensor) -> Tensor:
            return y * factor[0]

    model = nn.Sequential(Scaled())
    with under(model, Recompute(block="0")):
        loss = model(torch.ones(5, 6)).sum()
        factor[0] = 3.0
        with pytest.raises(ApplyError, match="'0' is recomputed in backward, and what it saves differs"):
            loss.backward()
    assert model[0].up.weight.grad is None


def test_writes_into_what_a_dropped_block_saved_are_noticed() -> None:
    class Written(ReadsAGlobal):
        def between(self, y: Tensor) -> Tensor:
            self.kept = torch.sin(super().between(y))
            return self.kept * self.kept

    model = nn.Sequential(Written())
    with under(model, Recompute(block="0")):
        loss = model(torch.ones(5, 6)).sum()
        model[0].kept.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
