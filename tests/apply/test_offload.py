"""Offloaded activations: the same gradients to the bit, each range moved once, nothing left behind."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_engines import KIB, Pool, Tiny, held_bytes, is_empty, loaded_bytes, offload_for, shares_with, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memwall.apply.offload import engine
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.entry import Saved
from memwall.errors import ApplyError
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

pytestmark = pytest.mark.timeout(60)


def train(
    offload: ActivationOffload | None, dtype: torch.dtype, num_steps: int = 3
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the first step and parameters after the last, from fixed seeds."""
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    if offload is not None:
        offload._is_excluded = shares_with(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first: list[Tensor] = []
    for step in range(num_steps):
        with offload.hooks() if offload is not None else nullcontext():
            loss = model(tokens())
        loss.backward()
        if step == 0:
            first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return first, [p.detach().clone() for p in model.parameters()]


def test_hooks_are_hidden_from_the_compiler_once_and_not_at_every_block(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: list[Any] = []
    monkeypatch.setattr(engine, "has_compiler", lambda: True)
    monkeypatch.setattr(engine, "unseen", lambda function: hidden.append(function) or function)
    engine._hidden.cache_clear()
    try:
        with offload_for(pool) as offload:
            train(offload, torch.float32, num_steps=1)
            assert offload.bytes_written > 0
            assert offload.hooks() is not offload.hooks()
        assert len(hidden) == 2
    finally:
        engine._hidden.cache_clear()


# The same bits, read ahead of their use.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_bytes", [16 * KIB, 1 << 20])
def test_training_is_bitwise_equal(pool: Pool, dtype: torch.dtype, window_bytes: int) -> None:
    plain_gradients, plain_parameters = train(None, dtype)
    with offload_for(pool, window_bytes=window_bytes) as offload:
        gradients, parameters = train(offload, dtype)
        assert offload.bytes_written > 500_000
        assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(plain_parameters, parameters, strict=True))
        assert is_empty(offload, pool)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_parts_that_are_written_one_after_the_other_come_back_as_each_was_saved(pool: Pool, kind: type[Any]) -> None:
    """GIVEN a cell that makes its gates in place, part by part, and saves each WHEN they move THEN nothing changes."""

    def gradients(offload: ActivationOffload | None) -> list[Tensor]:
        torch.manual_seed(0)
        cell, data = kind(8, 64), torch.randn(64, 8)
        state: Any = None
        if offload is not None:
            offload._is_excluded = shares_with(cell)
        with offload.hooks() if offload is not None else nullcontext():
            for _ in range(3):
                state = cell(data, state)
            out = state[0] if isinstance(state, tuple) else state
        return list(torch.autograd.grad(out.square().sum(), list(cell.parameters())))

    plain = gradients(None)
    with offload_for(pool) as offload:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(offload), strict=True))
        assert offload.bytes_written > 0
        assert is_empty(offload, pool)


def test_boundary_scope_moves_only_block_inputs_and_gives_the_same_gradients(pool: Pool) -> None:
    def gradients(offload: ActivationOffload | None, model: Tiny) -> list[Tensor]:
        torch.manual_seed(1)
        x = model.embedding(tokens())
        with offload.hooks() if offload is not None else nullcontext():
            for index in range(2):
                x = checkpoint(model.block, index, x, use_reentrant=False)
        return list(torch.autograd.grad(x.square().mean(), list(model.qkv.parameters())))

    model = Tiny()
    plain = gradients(None, model)
    with offload_for(pool, model) as offload:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(offload, model), strict=True))
        assert offload.bytes_written == 2 * 6 * 40 * 32 * 4


def test_groups_are_prefetched_before_they_are_needed(pool: Pool) -> None:
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    with offload_for(pool, window_bytes=16 * KIB) as offload:
        x = torch.randn(64, 64)
        outputs = []
        for key, weight in enumerate(weights):
            with offload.group(("layer", key)), offload.hooks():
                outputs.append(F.gelu(x * 2 @ weight))
        offload.prefetch(("layer", 2))
        offload.prefetch(("no such", 9))
        read = offload.bytes_read
        assert loaded_bytes(offload) == read > 0
        outputs[2].sum().backward()
        assert loaded_bytes(offload) <= 16 * KIB
        sum(output.sum() for output in outputs[:2]).backward()
        assert all(weight.grad is not None for weight in weights)


def test_reading_ahead_stays_within_the_window_and_leaves_nothing_to_wait_for(pool: Pool) -> None:
    with offload_for(pool, window_bytes=40 * KIB) as offload:
        sources = [torch.randn(2048) for _ in range(12)]  # 8 KiB each
        packed = [offload.pack(source) for source in sources]
        for left in reversed(range(12)):
            assert torch.equal(offload.unpack(packed[left]), sources[left])
            # The window of five is for what comes after the one being taken.
            assert loaded_bytes(offload) == min(left, 5) * 8 * KIB
            packed.pop()
        assert offload.bytes_read == 12 * 8 * KIB


def test_what_is_read_ahead_is_queued_when_backward_has_its_own(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **settings: Any) -> Any:
            order.append(name)
            return call(*arguments, **settings)

        return noted

    with offload_for(pool, window_bytes=40 * KIB) as offload:
        packed = [offload.pack(torch.randn(2048)) for _ in range(4)]
        for saved in packed:
            saved.entry.parked.write.wait()  # what has not left yet is copied
        monkeypatch.setattr(pool, "read", noting("read", pool.read))
        monkeypatch.setattr(Saved, "view_of", noting("made", Saved.view_of))
        offload.unpack(packed[3])
        offload.unpack(packed[2])
    assert order == ["read", "made", "read", "read", "read", "made"]


def test_a_range_that_every_layer_shares_leaves_room_to_read_ahead(pool: Pool) -> None:
    with offload_for(pool, window_bytes=40 * KIB) as offload:
        shared, sources = torch.randn(2048), [torch.randn(8192) for _ in range(4)]  # 8 and 32 KiB
        packed = [(offload.pack(shared), offload.pack(source)) for source in sources]
        kept = offload.unpack(packed[3][0])
        offload.unpack(packed[3][1])
        assert loaded_bytes(offload) == 40 * KIB  # the shared one for its other readers, and the next layer's own
        assert torch.equal(kept, shared)


@pytest.mark.slow
def test_the_graph_may_change_between_steps(pool: Pool) -> None:
    model = Tiny()
    model.eval()
    with offload_for(pool, model) as offload:
        for order in ([0, 1], [1], [1, 0, 1], [0]):
            x = model.embedding(tokens())
            expected = actual = x
            for index in order:
                expected = model.block(index, expected)
            with offload.hooks():
                for index in order:
                    actual = model.block(index, actual)
            wanted = torch.autograd.grad(expected.square().mean(), x)
            assert torch.equal(torch.autograd.grad(actual.square().mean(), x)[0], wanted[0])
            del expected, actual
            assert is_empty(offload, pool)


def test_what_must_or_need_not_move_stays_the_same_object(pool: Pool) -> None:
    parameter = nn.Parameter(torch.randn(100, 100))
    stays = [
        parameter.detach(),
        parameter.detach().t()[3:],
        torch.randn(255),
        torch.empty(0),
        torch.randn(100, 100).to_sparse(),
        torch.randn(100, 100, dtype=torch.complex64).conj(),
        torch.empty(100, 100, device="meta"),
        nn.Parameter(torch.randn(100, 100)),
    ]
    storage = parameter.untyped_storage().data_ptr()
    with ActivationOffload(
        pool, min_bytes=1024, is_excluded=lambda tensor: tensor.untyped_storage().data_ptr() == storage
    ) as offload:
        assert all(offload.unpack(offload.pack(tensor)) is tensor for tensor in stays)
        assert offload.bytes_written == 0


def test_without_a_disk_cpu_tensors_stay() -> None:
    with ActivationOffload(None, min_bytes=1, is_excluded=lambda tensor: False) as offload:
        tensor = torch.randn(1000)
        assert offload.unpack(offload.pack(tensor)) is tensor


# Lifetimes.


def test_retained_graphs_and_double_backward(pool: Pool) -> None:
    with offload_for(pool) as offload:
        x = torch.randn(64, 64, requires_grad=True)
        expected = torch.autograd.grad(x.exp().mul(x).tanh().sum(), x, create_graph=True)[0]
        expected_second = torch.autograd.grad(expected.square().sum(), x)[0]
        with offload.hooks():
            y = x.exp().mul(x).tanh().sum()
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected)
        with offload.hooks():
            first = torch.autograd.grad(y, x, create_graph=True)[0]
        assert torch.equal(torch.autograd.grad(first.square().sum(), x)[0], expected_second)
        assert offload.bytes_written > 0
        del y, first
        assert is_empty(offload, pool)


class _LooksTwice(torch.autograd.Function):
    """Its backward asks for saved tensors one by one, and each time autograd unpacks all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = ctx.saved_tensors[0]
        weight = ctx.saved_tensors[1]
        assert ctx.saved_tensors[0].data_ptr() == x.data_ptr()
        return gradient * weight, gradient * x


def test_what_is_asked_for_again_while_somebody_has_it_is_not_read_again(pool: Pool) -> None:
    x, weight = (torch.randn(1 << 16, requires_grad=True) for _ in range(2))
    with ActivationOffload(pool, window_bytes=1 << 20, min_bytes=1 << 12, is_excluded=lambda _: False) as offload:
        with offload.hooks():
            out = _LooksTwice.apply(x * 1, weight * 1)
        written_bytes = offload.bytes_written
        out.sum().backward()
        assert written_bytes > 0
        # Of two that were saved, nobody has kept the second at the second look.
        assert offload.bytes_read <= 1.5 * written_bytes + x.nbytes
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def test_a_forward_without_backward_leaves_nothing(pool: Pool) -> None:
    model = Tiny()
    with offload_for(pool, model) as offload:
        with offload.hooks():
            losses = [model(tokens()) for _ in range(3)]
        assert held_bytes(offload) > 0
        losses[1].backward()
        del losses
        assert is_empty(offload, pool)


def test_no_grad_inside_moves_nothing(pool: Pool) -> None:
    with offload_for(pool) as offload, offload.hooks(), torch.no_grad():
        Tiny()(tokens())
        assert offload.bytes_written == 0


def test_an_exception_in_forward_leaves_nothing(pool: Pool) -> None:
    model = Tiny()
    with offload_for(pool, model) as offload:
        model.mlp[1].append(nn.Linear(7, 7))  # the last layer does not fit its input
        with offload.hooks(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(tokens())
        assert offload.bytes_written > 0
        assert is_empty(offload, pool)


def test_several_forwards_before_their_backwards(pool: Pool) -> None:
    model = Tiny()
    model.eval()
    plain = torch.autograd.grad(model(tokens()), list(model.qkv.parameters()))
    with offload_for(pool, model) as offload:
        with offload.hooks():
            losses = [model(tokens()) for _ in range(3)]
        for index in (1, 2, 0):
            gradients = torch.autograd.grad(losses[index], list(model.qkv.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
        del losses
        assert is_empty(offload, pool)


def test_backward_after_close_is_an_error(pool: Pool) -> None:
    offload = offload_for(pool)
    x = torch.randn(64, 64, requires_grad=True)
    with offload.hooks():
        y = x.exp().sum()
    offload.close()
    pool.wait_for(lambda: pool.scratch.used_bytes == 0)
    with pytest.raises(ApplyError, match=r"closed before backward asked for float32\[64, 64\]"):
        y.backward()


# Invisible to whoever records the step.


def test_an_active_dispatch_mode_does_not_see_the_engine(pool: Pool) -> None:
    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def recorded(offload: ActivationOffload | None) -> list[str]:
        model.zero_grad()
        with Recorder() as recorder:
            with offload.hooks() if offload is not None else nullcontext():
                loss = model(tokens())
            loss.backward()
        # Autograd itself detaches each tensor it hands to a pack hook.
        return [name for name in recorder.names if name != "aten.detach.default"]

    model = Tiny()
    with offload_for(pool, model) as offload:
        assert recorded(offload) == recorded(None)
        assert offload.bytes_written > 0


def test_what_an_operation_saves_before_it_writes_it_stays(tmp_path: Path) -> None:
    """GIVEN rrelu, which saves the noise that it has yet to draw, in a step that parks all that it saves."""

    def gradients(engine: ActivationOffload | None) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        with nullcontext() if engine is None else engine.hooks():
            loss = F.rrelu(layer(torch.ones(512, 64)), training=True).square().mean()
        loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    with TransferPool(ScratchFile(tmp_path)) as pool:
        engine = ActivationOffload(pool, min_bytes=1, is_excluded=lambda _: False)
        assert torch.equal(gradients(engine), gradients(None))
        assert engine.bytes_written > 0
        engine.close()
