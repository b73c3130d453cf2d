"""Parameters on disk when things go wrong: refused beforehand, a typed error, or the same bits all the same."""

import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_models import GPT, KIB, everything, loss_of, streamed, train_gpt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.apply.optimizer_state.partial_step import inner_step_of
from memwall.apply.streaming import parameter_streaming
from memwall.apply.streaming.open_streaming import open_parameter_streaming
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import DiskPlace
from memwall.errors import ApplyError, MemwallError, OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60)]


@pytest.mark.slow
def test_undo_leaves_no_trace_and_training_goes_on(state_pool: TransferPool) -> None:
    plain = train_gpt(None)[1]
    torch.manual_seed(0)
    model = GPT()
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def accumulate(step: int) -> None:
        for micro in range(3):
            (loss_of(model, 10 * step + micro) / 3).backward()

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    with streamed(model, state_pool, optimizer):
        accumulate(0)
        update()
        accumulate(1)
    for module in model.modules():
        assert "forward" not in module.__dict__
        for parameter in module.parameters(recurse=False):
            assert type(parameter) is nn.Parameter
            assert type(parameter.grad) is Tensor
            assert not parameter._post_accumulate_grad_hooks
    update()
    for step in range(2, 4):
        accumulate(step)
        update()
    left = everything(model, optimizer)
    assert [name for name, value in plain.items() if not torch.equal(left[name], value)] == []


def test_gradients_that_exist_already_go_too(state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = GPT()
        loss_of(model, 0).backward()
        if is_streamed:
            with streamed(model, state_pool) as streaming:
                assert streaming.resident_bytes == 0
                loss_of(model, 1).backward()
        else:
            loss_of(model, 1).backward()
        found.append(everything(model))
    assert [name for name, value in found[0].items() if not torch.equal(found[1][name], value)] == []


def train(model: GPT, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for step in range(num_steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def differences(
    made: Callable[[], tuple[GPT, torch.optim.Optimizer]],
    run: Callable[[GPT, torch.optim.Optimizer], None],
    pool: TransferPool,
) -> list[str]:
    """What a run leaves otherwise with its parameters streamed."""
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model, optimizer = made()
        if is_streamed:
            with streamed(model, pool, optimizer) as streaming:
                run(model, optimizer)
                assert streaming.resident_bytes <= 4 * 64 * KIB
        else:
            run(model, optimizer)
        found.append(everything(model, optimizer))
    return [name for name, value in found[0].items() if not torch.equal(found[1][name], value)]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_the_loop_leaves_a_model_that_trains_on(place: str, state_pool: TransferPool) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            raise ValueError("as it happens")

    def fail(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if place == "forward":
            raise ValueError("as it happens")
        return (Failing.apply(*args),)

    def made() -> tuple[GPT, torch.optim.Optimizer]:
        model = GPT()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model: GPT, optimizer: torch.optim.Optimizer) -> None:
        handle = model.layers[2].qkv.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="as it happens"):
            loss_of(model, 0).backward()
        handle.remove()
        optimizer.zero_grad()
        train(model, optimizer, num_steps=2)

    assert differences(made, run, state_pool) == []


@pytest.mark.slow
def test_what_is_read_ahead_for_a_step_that_goes_another_way_does_not_stay(state_pool: TransferPool) -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = optimizer.param_groups[0]["params"]
    with streamed(model, state_pool, window_bytes=KIB) as streaming:
        step = streaming.around_step(inner_step_of(optimizer))
        for number in range(4):
            loss_of(model, number).backward()
            random.Random(number).shuffle(order)
            for half in (order[: len(order) // 2], order[len(order) // 2 :]):
                optimizer.param_groups[0]["params"] = half
                with torch.no_grad():
                    step(optimizer)
            # Gradients are there still: of two parameters at most, which are 48 KiB each at most.
            assert streaming.resident_bytes <= 4 * 48 * KIB
            for parameter in order:
                parameter.grad = None


class Aside(nn.Module):
    """A result leaves the block as an attribute."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = self.first if is_tied else nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.aside = self.last(y.tanh())
        return y


@pytest.mark.parametrize(
    "is_tied", [False, True], ids=["of a matrix of its own", "of a matrix that the output needs too"]
)
def test_a_backward_that_begins_elsewhere_than_at_the_output_raises(is_tied: bool, state_pool: TransferPool) -> None:
    model = nn.Sequential(Aside(is_tied=is_tied), nn.Linear(64, 64))
    message = r"0\.(first|last)\.weight (before the|was read or written while it was on disk)"
    x = torch.ones(1, 64, requires_grad=True)
    streaming = ParameterStreaming(
        model, ParameterTier(DiskPlace(state_pool), window_bytes=KIB, min_bytes=KIB), blocks=("0",)
    )
    out = model(x)
    aside: Tensor = model[0].aside  # type: ignore[assignment, union-attr]
    with pytest.raises(MemwallError, match=message):
        (out.sum() + aside.sum()).backward()
    assert isinstance(streaming.failure, MemwallError)
    with pytest.raises(MemwallError, match=message):
        model(x)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "run again in backward"])
def test_a_backward_through_the_backward_brings_all_back_for_good(
    is_checkpointed: bool, state_pool: TransferPool, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        with streamed(model, state_pool) if is_streamed else nullcontext() as streaming:
            for step in range(2):
                x = torch.full((2, 64), 1.0 + step, requires_grad=True)
                out = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                (out.sum() + slope.square().sum()).backward()
            if streaming is not None:
                assert streaming.away_bytes == 0
                assert caplog.text.count("was asked for with create_graph=True") == 1
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_through_the_backward_that_the_machine_has_no_room_for_raises(
    state_pool: TransferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_streaming, "free_memory_bytes", lambda: 0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with streamed(model, state_pool):
        x = torch.ones(1, 64, requires_grad=True)
        with pytest.raises(ApplyError, match=r"'2' was asked for with create_graph=True .* no room for 16\.0 KiB"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_gradients_may_be_asked_for_without_accumulating_them(state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = GPT()
        if is_streamed:
            with streamed(model, state_pool) as streaming:
                gradients = torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
                assert streaming.resident_bytes <= 4 * 64 * KIB
        else:
            gradients = torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
        found.append(gradients)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_block_without_outputs_stays_in_memory(state_pool: TransferPool, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Aside):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return "done"

    model = Silent()
    with streamed(model, state_pool, blocks=("",)):
        model(torch.ones(1, 64))
        model.aside.sum().backward()
        assert type(model.first.weight) is nn.Parameter
    assert torch.equal(model.last.weight.grad[0], torch.tanh(model.first(torch.ones(64))))
    assert "finds no output of the model that a backward could begin at" in caplog.text


@pytest.mark.slow
def test_frozen_parameters_are_streamed_too(state_pool: TransferPool) -> None:
    def made() -> tuple[GPT, torch.optim.Optimizer]:
        model = GPT()
        for layer in model.layers[::2]:
            layer.up.weight.requires_grad_(False)
        model.layers[1].requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    assert differences(made, train, state_pool) == []


def test_sparse_gradients_stay_in_memory(state_pool: TransferPool) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(64, 64, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

        def run(table: nn.Module = table, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for step in range(3):
                table(torch.tensor([step, step, 5])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        if is_streamed:
            with streamed(table, state_pool, optimizer):
                run()
        else:
            run()
        found.append(table.weight.detach().clone())
    assert torch.equal(*found)


# Refused, with nothing changed.


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            ("layers.9",),
            r"streamed for 'layers\.9', but GPT has no such module|of 'layers\.9' are to be streamed, but GPT",
        ),
        (("layers.1", "layers.1.up"), r"'layers\.1\.up' and for 'layers\.1', which holds it; name one"),
    ],
)
def test_blocks_that_do_not_exist_or_overlap_are_refused(
    blocks: tuple[str, ...], message: str, state_pool: TransferPool
) -> None:
    model = GPT()
    with pytest.raises(ApplyError, match=message):
        ParameterStreaming(model, ParameterTier(DiskPlace(state_pool), window_bytes=KIB, min_bytes=KIB), blocks=blocks)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_a_hook_on_accumulated_gradients_is_refused(state_pool: TransferPool) -> None:
    model = GPT()
    model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(
        ApplyError, match=r"layers\.0\.up\.weight has a hook that runs when its gradient is accumulated"
    ):
        ParameterStreaming(model, ParameterTier(DiskPlace(state_pool), window_bytes=KIB, min_bytes=KIB))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_parameters_that_share_memory_with_others_stay(state_pool: TransferPool) -> None:
    model = nn.Linear(64, 64)
    flat = torch.randn(2, 64, 64)
    model.weight = nn.Parameter(flat[0])
    with streamed(model, state_pool, min_bytes=KIB) as streaming:
        assert streaming.away_bytes == 0
        flat.zero_()
        assert model.weight.sum() == 0


def test_too_little_disk_leaves_everything_in_memory(tmp_path: Path) -> None:
    model = GPT()
    before = everything(model)
    with pytest.raises(StoreError, match=r"more of disk are needed"):
        open_parameter_streaming(model, disk=str(tmp_path), capacity_bytes=200 * KIB, window_bytes=KIB, min_bytes=KIB)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert [name for name, value in everything(model).items() if not torch.equal(value, before[name])] == []


# A disk that fails.


class Flipping(SystemBackend):
    """Changes a byte of what is read, once asked to."""

    is_on = False

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        count = super().pread(fd, buffer, offset)
        if self.is_on:
            buffer[7] ^= 1
        return count


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_bytes_that_came_back_different_end_the_run(
    phase: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Flipping()
    caplog.set_level(logging.ERROR)
    with TransferPool(ScratchFile(tmp_path, backend=backend), block_bytes=8 * KIB) as pool:
        model = GPT()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        streaming = ParameterStreaming(model, ParameterTier(DiskPlace(pool), window_bytes=16 * KIB, min_bytes=4 * KIB))

        def train() -> None:
            for step in range(2):
                backend.is_on = step == 1 and phase == "forward"
                loss = loss_of(model, step)
                backend.is_on = step == 1 and phase == "backward"
                loss.backward()
                backend.is_on = step == 1 and phase == "step"
                optimizer.step()
                optimizer.zero_grad()

        with pytest.raises(OffloadIOError, match="came back different"):
            train()
        backend.is_on = False
        with pytest.raises(StoreError, match="came back different"):
            loss_of(model, 2)
        with pytest.raises(StoreError, match="came back different"):
            streaming.undo()
