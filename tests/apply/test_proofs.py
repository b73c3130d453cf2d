"""Actions prove themselves while a run goes on: one that changes the training is dropped at once, or ends the run."""

import copy
import inspect
import logging
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import WIDTH, Block, offload
from hidden_state import Calls
from plans import plan_of
from proven_models import WritesPastAutograd, assert_same, model_with, trained
from torch import Tensor, nn
from torch.utils.checkpoint import SelectiveCheckpointContext

from memwall.apply import technique
from memwall.apply.blocks.hidden_state import HiddenState
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.techniques.offload import OffloadLayer
from memwall.errors import ApplyError, NotExactError
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_block_that_writes_past_autograd_keeps_what_it_saves_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with(WritesPastAutograd)
    expected = trained(copy.deepcopy(model))
    plan = plan_of(model, offload("blocks.0"), offload("blocks.1"))
    with Session(plan=plan, disk=str(tmp_path)) as session, caplog.at_level(logging.WARNING):
        assert_same(trained(model, session), expected)
    reason = "float32[16, 128] saved in ('blocks.1', 2) is written past autograd, by .data or through numpy"
    assert session.measured.lost == {("offload", "blocks.1"): reason}
    assert [record.message for record in caplog.records] == [
        f"'blocks.1' keeps what it saves and is not offloaded: {reason}"
    ]


def test_what_is_written_after_the_block_is_what_backward_reads(tmp_path: Path) -> None:
    """GIVEN a loop that clamps what a block returned, past autograd, while it holds that."""

    class Returned(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.outer(torch.tanh(self.inner(x))))

    def call(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x)
        out.data.clamp_(max=0.5)
        held.append(out)
        return out

    held: list[Tensor] = []
    model = model_with(Returned)
    model.call = call
    expected = trained(copy.deepcopy(model), num_steps=2)
    with Session(plan=plan_of(model, offload("blocks.1")), disk=str(tmp_path)) as session:
        assert_same(trained(model, session, num_steps=2), expected)
    assert list(session.measured.lost) == [("offload", "blocks.1")]


def test_a_recomputed_block_whose_results_are_written_past_autograd_ends_the_run() -> None:
    class Returned(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.outer(torch.tanh(self.inner(x))))

    model = model_with(Returned)
    optimizer = torch.optim.SGD(model.parameters())
    with Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session:
        session.attach(model, optimizer)
        out = model(torch.ones(16, WIDTH))
        out.data.clamp_(max=0.5)
        with pytest.raises(ApplyError, match=r"'blocks\.1' is recomputed .* was written past autograd in between"):
            out.square().mean().backward()
        assert model.blocks[1].inner.weight.grad is None


def counted() -> tuple[type[Block], Calls]:
    """Returns a block, and what it appends to whenever it runs."""
    calls = Calls()

    class Counted(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("forward")
            return super().forward(x)

    return Counted, calls


def test_without_room_for_a_second_run_the_one_in_backward_is_the_proof(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN a step that fills its budget WHEN a block is proven THEN nothing runs twice in forward."""
    block, calls = counted()
    model = model_with(block)
    expected = trained(copy.deepcopy(model), num_steps=1)
    calls.clear()
    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: 1000)
    with Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session, caplog.at_level(logging.DEBUG):
        session.attach(model, optimizer := torch.optim.AdamW(model.parameters()))
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
        loss = model(batch).square().mean()
        assert calls == ["forward"]
        loss.backward()
        assert calls == ["forward"] * 2
        assert_same([p.grad for p in model.parameters() if p.grad is not None], expected)
        optimizer.step()
    assert "'blocks.1' has no room for a second run, and is proven by the one in backward" in caplog.messages


class AddsGradients(Block):
    """Has a loss of its own, whose gradients it adds to those of the step; the last layer's by hand."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        own = y.square().mean()
        if self.is_by_hand:
            (found,) = torch.autograd.grad(own, [self.outer.weight], retain_graph=True)
            self.outer.weight.grad = found if self.outer.weight.grad is None else self.outer.weight.grad + found
        else:
            own.backward(retain_graph=True)
        return y

    is_by_hand = False


class AddsGradientsByHand(AddsGradients):
    is_by_hand = True


@pytest.mark.parametrize("kind", [AddsGradients, AddsGradientsByHand])
def test_a_block_that_adds_to_gradients_itself_does_so_once(kind: type[Block]) -> None:
    model = model_with(kind)
    expected = trained(copy.deepcopy(model))
    with Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session:
        assert_same(trained(model, session), expected)
    assert "adds to gradients itself" in session.measured.lost["recompute", "blocks.1"]


class AddsGradientsLater(Block):
    """Begins to add them after a while, before its last layer."""

    num_before = 4

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.inner(x))
        self.num_before -= 1
        if self.num_before < 0:
            y.square().mean().backward(retain_graph=True)
        return x + self.outer(y)


def test_a_block_that_begins_to_add_to_gradients_later_ends_the_run() -> None:
    model = model_with(AddsGradientsLater)
    with (
        Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session,
        pytest.raises(ApplyError, match=r"'blocks\.1' is recomputed in backward, and its forward adds to gradients"),
    ):
        trained(model, session, num_steps=8)


def test_without_room_to_drop_such_a_block_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: 0)
    model = model_with(AddsGradients)
    with (
        Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session,
        pytest.raises(
            ApplyError, match=r"'blocks\.1' is recomputed in backward, and its forward adds to gradients itself"
        ),
    ):
        trained(model, session, num_steps=1)


def test_what_a_block_saves_is_let_go_of_in_its_first_run_where_there_is_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a plan under which a block keeps nothing WHEN it is proven THEN it does not keep all that it saves."""
    num_results, room_results, result_bytes = 12, 5, 16 * WIDTH * 4
    made: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def num_alive() -> int:
        nonlocal most
        found = sum(one() is not None for one in made)
        most = max(most, found)
        return found

    class Deep(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(num_results):
                x = torch.tanh(x)
                made.append(weakref.ref(x.untyped_storage()))
            return x

    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: (room_results - num_alive()) * result_bytes)
    model = model_with(Deep)
    with Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session:
        session.attach(model, torch.optim.SGD(model.parameters()))
        loss = model(torch.ones(16, WIDTH)).sum()
        assert most < room_results
        loss.backward()


def test_a_block_that_saves_more_than_there_is_room_for_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a block of which the plan knows how much it saves WHEN that has no room THEN it does not run twice."""
    block, calls = counted()
    room_bytes = 1 << 20
    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: room_bytes)
    for saved_bytes, expected in ((room_bytes, 2), (room_bytes + 1, 1)):
        model = model_with(block)
        with Session(plan=plan_of(model, Recompute(block="blocks.1", saved_bytes=saved_bytes))) as session:
            session.attach(model, torch.optim.SGD(model.parameters()))
            calls.clear()
            loss = model(torch.ones(16, WIDTH)).sum()
            assert len(calls) == expected
            loss.backward()


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="before 2.12 torch does not say what a kept operation returned",
)
def test_a_second_run_has_room_for_kept_results_beside_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a block that keeps some results WHEN it is proven THEN the second run's are no more than there is room."""
    block, calls = counted()
    kept = Recompute(block="blocks.1", kept_ops=(1, 2))  # the first layer's and tanh's: 16 x 128 numbers each
    needed_bytes = 3 * WIDTH * 2 * WIDTH * 4 + 2 * 16 * 2 * WIDTH * 4
    for room_bytes, expected in ((needed_bytes, 2), (needed_bytes - 1, 1)):
        monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler, room_bytes=room_bytes: room_bytes)
        model = model_with(block)
        with Session(plan=plan_of(model, kept)) as session:
            session.attach(model, torch.optim.SGD(model.parameters()))
            calls.clear()
            loss = model(torch.ones(16, WIDTH)).sum()
            assert len(calls) == expected
            loss.backward()


def test_a_block_that_was_not_run_twice_and_differs_in_backward_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(Block):
        def forward(self, x: Tensor) -> Tensor:
            moved.append(0)
            return x + self.outer(torch.tanh(self.inner(x) * len(moved)))

    moved: list[int] = []
    monkeypatch.setattr(HiddenState, "recalled", lambda state: nullcontext())
    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: 0)
    model = model_with(Moving)
    with (
        Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session,
        pytest.raises(ApplyError, match=r"'blocks\.1' is recomputed in backward, and what it saves differs") as error,
    ):
        trained(model, session, num_steps=1)
    # Three times the largest tensor that is saved: a weight of 64 x 128 numbers of 4 bytes.
    assert "The budget lacked 96.0 KiB for a second run in forward, after which such a block is not" in str(error.value)
    assert "give a budget whose plan does not recompute it, or, of a plan file, take it out" in str(error.value)


def test_of_several_ranks_each_runs_a_block_twice_whatever_room_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a rank without room WHEN others prove a block THEN it does, too, and no collective in it lacks a rank."""
    block, calls = counted()
    monkeypatch.setattr(AllocatorHandler, "room_bytes", lambda handler: 0)
    for num_ranks, expected in ((1, 1), (2, 2)):
        model = model_with(block)
        with Session(plan=plan_of(model, Recompute(block="blocks.1"))) as session:
            session.attach(model, torch.optim.SGD(model.parameters()))
            with monkeypatch.context() as patched:
                patched.setattr(technique, "num_processes", lambda number=num_ranks: number)
                calls.clear()
                loss = model(torch.ones(16, WIDTH)).sum()
                assert len(calls) == expected
            loss.backward()


def test_bytes_that_come_back_different_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a tier that mixes bytes up without noticing WHEN backward wants them THEN no gradient is made of them."""
    restore = ActivationOffload._restore

    def mixed_up(engine: ActivationOffload, saved: Any) -> Tensor:
        return restore(engine, saved).flip(0)

    monkeypatch.setattr(ActivationOffload, "_restore", mixed_up)
    model = model_with(Block)
    with Session(plan=plan_of(model, offload("blocks.1")), disk=str(tmp_path)) as session:
        session.attach(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(NotExactError, match=r"offload of 'blocks\.1' changes the training.* came back different"):
            model(torch.randn(16, WIDTH)).square().mean().backward()


def test_lossy_forms_are_not_compared() -> None:
    layer = OffloadLayer(engine=None, form="int8")  # type: ignore[arg-type]
    layer.set_proving(True)
    assert not layer._is_proving
