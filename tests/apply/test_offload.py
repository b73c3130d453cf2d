"""Offloaded activations: the same gradients to the bit, each range moved once, nothing left behind."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.offload import ActivationOffload, SavedTensorModifiedError
from memwall.errors import ApplyError, StoreError
from memwall.predict.process import TENSOR_HEAP
from memwall.predict.tensor_heap import heap_unavailable_reason
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10
pytestmark = pytest.mark.timeout(60)


class Tiny(nn.Module):
    """Two blocks with what makes saved tensors awkward: query, key and value in one matrix, an expanded mask, an
    in-place activation, dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32), nn.Dropout(0.1)
            )
            for _ in range(2)
        )
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(40, 40).tril().log())

    def block(self, index: int, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv[index](x).chunk(3, dim=-1))
        mask = self.mask.to(x.dtype).expand(x.shape[0], 4, 40, 40)
        mixed = ((q @ k.transpose(-1, -2)) / 3 + mask).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2)
        out: Tensor = x + self.mlp[index](x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(2):
            x = self.block(index, x)
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


def tokens() -> Tensor:
    """[batch 6, length 40]"""
    return torch.randint(50, (6, 40), generator=torch.Generator().manual_seed(3))


def shares_with(module: nn.Module) -> Callable[[Tensor], bool]:
    """True for what lives in a parameter's or buffer's storage."""
    held = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    return lambda tensor: tensor.untyped_storage().data_ptr() in held


OWNERS: "weakref.WeakKeyDictionary[TransferPool, AllocatorHandler]" = weakref.WeakKeyDictionary()


@pytest.fixture(params=["default", "tensor-heap"])
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferPool]:
    """Small blocks, so that tiny tensors take several; in a heap of their own tensors lie on whole pages."""
    allocator = AllocatorHandler()
    if request.param == TENSOR_HEAP:
        if heap_unavailable_reason():
            pytest.skip(heap_unavailable_reason() or "")
        monkeypatch.setattr("memwall.apply.allocator.MIN_TENSOR_BYTES", KIB)
        allocator.apply(TENSOR_HEAP)
    with TransferPool(ScratchFile(tmp_path), block_bytes=8 * KIB) as made:
        OWNERS[made] = allocator
        yield made
    allocator.undo()


def offload_for(pool: TransferPool, module: nn.Module | None = None, **settings: int) -> ActivationOffload:
    """An engine that moves almost everything through a window smaller than the largest tensor."""
    excluded = shares_with(module) if module is not None else (lambda tensor: False)
    sizes = {"window_bytes": 32 * KIB, "min_bytes": 1024} | settings
    return ActivationOffload(pool, is_excluded=excluded, owns_pages=OWNERS[pool].owns_pages, **sizes)


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


def is_empty(offload: ActivationOffload, pool: TransferPool) -> bool:
    """Nothing is held in memory or on disk."""
    gc.collect()
    if offload.num_held or offload.held_bytes or offload.loaded_bytes:
        return False
    pool.wait_for(lambda: pool.scratch.used_bytes == 0)
    return True


# A1: the same bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_bytes", [16 * KIB, 1 << 20])
def test_training_is_bitwise_equal(pool: TransferPool, dtype: torch.dtype, window_bytes: int) -> None:
    plain_gradients, plain_parameters = train(None, dtype)
    with offload_for(pool, window_bytes=window_bytes) as offload:
        gradients, parameters = train(offload, dtype)
        assert offload.bytes_written > 500_000
        assert all(torch.equal(a, b) for a, b in zip(plain_gradients, gradients, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(plain_parameters, parameters, strict=True))
        assert is_empty(offload, pool)


def test_boundary_scope_moves_only_block_inputs_and_gives_the_same_gradients(pool: TransferPool) -> None:
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


def test_groups_are_prefetched_before_they_are_needed(pool: TransferPool) -> None:
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
        assert offload.loaded_bytes == read > 0
        outputs[2].sum().backward()
        assert offload.loaded_bytes <= 16 * KIB
        sum(output.sum() for output in outputs[:2]).backward()
        assert all(weight.grad is not None for weight in weights)


def test_reading_ahead_stays_within_the_window_and_leaves_nothing_to_wait_for(pool: TransferPool) -> None:
    with offload_for(pool, window_bytes=40 * KIB) as offload:
        sources = [torch.randn(2048) for _ in range(12)]  # 8 KiB each
        packed = [offload.pack(source) for source in sources]
        for left in reversed(range(12)):
            assert torch.equal(offload.unpack(packed[left]), sources[left])
            # The window of five is for what comes after the one being taken.
            assert offload.loaded_bytes == min(left, 5) * 8 * KIB
            packed.pop()
        assert offload.bytes_read == 12 * 8 * KIB


def test_a_range_that_every_layer_shares_leaves_room_to_read_ahead(pool: TransferPool) -> None:
    with offload_for(pool, window_bytes=40 * KIB) as offload:
        shared, sources = torch.randn(2048), [torch.randn(8192) for _ in range(4)]  # 8 and 32 KiB
        packed = [(offload.pack(shared), offload.pack(source)) for source in sources]
        kept = offload.unpack(packed[3][0])
        offload.unpack(packed[3][1])
        assert offload.loaded_bytes == 40 * KIB  # the shared one for its other readers, and the next layer's own
        assert torch.equal(kept, shared)


def test_the_graph_may_change_between_steps(pool: TransferPool) -> None:
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


# A2: in-place writes, and tensors that share memory.


@pytest.mark.parametrize("min_bytes", [1024, 1 << 20], ids=["moved", "kept"])
def test_an_in_place_write_after_the_save_raises(pool: TransferPool, min_bytes: int) -> None:
    with offload_for(pool, min_bytes=min_bytes) as offload:
        x = torch.randn(64, 64, requires_grad=True)
        with offload.group("layers.3"), offload.hooks():
            y = x.exp()
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"float32\[64, 64\].*version 1, expected 0.*clone\(\)") as caught:
            y.sum().backward()
        assert isinstance(caught.value, SavedTensorModifiedError | ApplyError)
        assert ("saved in layers.3" in str(caught.value)) == (min_bytes == 1024)


def test_a_source_may_be_freed_and_its_address_used_again(pool: TransferPool) -> None:
    with offload_for(pool) as offload:
        packed = []
        for value in range(20):
            source = torch.full((4096,), float(value))
            packed.append(offload.pack(source))
            del source
        assert [offload.unpack(item)[7].item() for item in packed] == [float(value) for value in range(20)]


def test_a_write_in_place_between_two_saves_makes_two_copies(pool: TransferPool) -> None:
    with offload_for(pool) as offload:
        source = torch.zeros(4096)
        first = offload.pack(source)
        source.add_(1)
        second = offload.pack(source)
        assert offload.num_held == 2
        assert offload.unpack(second)[0] == 1
        with pytest.raises(SavedTensorModifiedError):
            offload.unpack(first)


def test_views_of_one_storage_move_once_and_come_back_with_their_strides(pool: TransferPool) -> None:
    with offload_for(pool) as offload:
        base = torch.randn(64, 96)
        views = [base, base.t(), *base.chunk(3, dim=1), base.view(96, 64), base[1:]]
        packed = [offload.pack(view.detach()) for view in views]
        assert (offload.num_held, offload.bytes_written) == (1, base.nbytes)
        for view, item in zip(views, packed, strict=True):
            back = offload.unpack(item)
            assert torch.equal(back, view)
            assert (back.stride(), back.dtype) == (view.stride(), view.dtype)
            assert back.data_ptr() % 64 == view.data_ptr() % 64 or base.data_ptr() % 64
        assert offload.bytes_read == base.nbytes  # shared, for the window has room
        del packed, item
        assert is_empty(offload, pool)


def test_a_small_view_moves_only_its_own_range(pool: TransferPool) -> None:
    with offload_for(pool) as offload:
        base = torch.randn(100, 1024)
        packed = [offload.pack(base[10:15]), offload.pack(base[50:60, ::2])]
        assert offload.bytes_written < 64 * KIB
        assert torch.equal(offload.unpack(packed[0]), base[10:15])
        assert torch.equal(offload.unpack(packed[1]), base[50:60, ::2])


def test_an_expanded_tensor_moves_its_base(pool: TransferPool) -> None:
    with offload_for(pool) as offload:
        wide = torch.randn(1, 1024).expand(500, 1024)
        packed = offload.pack(wide)
        assert offload.bytes_written == 4096
        back = offload.unpack(packed)
        assert torch.equal(back, wide)
        assert back.stride() == wide.stride() == (0, 1)


def test_what_must_or_need_not_move_stays_the_same_object(pool: TransferPool) -> None:
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


# A3: lifetimes.


def test_retained_graphs_and_double_backward(pool: TransferPool) -> None:
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


class GradientIsSaved(torch.autograd.Function):
    """As losses do whose forward has the gradient already: what it returns autograd may keep as `.grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (weight.detach() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("window_bytes", [16 * KIB, 1 << 20])
def test_what_becomes_a_gradient_may_be_written_and_what_was_saved_stays(pool: TransferPool, window_bytes: int) -> None:
    weight, gradient = torch.ones(2048, requires_grad=True), torch.full((2048,), 3.0)
    with offload_for(pool, window_bytes=window_bytes) as offload:
        with offload.hooks():
            losses = [GradientIsSaved.apply(weight, gradient) for _ in range(4)]
        for number, loss in enumerate(losses, start=1):
            loss.backward()
            assert weight.grad is not None
            assert weight.grad[0] == 3 * number
            assert gradient[0] == 3
        with offload.hooks():
            total = sum(GradientIsSaved.apply(weight, gradient) for _ in range(4))
        for number in range(5, 21, 4):
            total.backward(retain_graph=True)
            assert weight.grad[0] == 3 * (number + 3)
        torch.nn.utils.clip_grad_norm_([weight], 1e-3)
        assert gradient[0] == 3


def test_a_storage_freed_behind_autograds_back_is_an_error_not_other_bytes(
    pool: TransferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not OWNERS[pool].policy:
        pytest.skip("what malloc gave is copied at once")
    begun, gate, write = threading.Event(), threading.Event(), pool.scratch.write

    def waits(*arguments: Any) -> None:
        begun.set()
        gate.wait(10)
        write(*arguments)

    monkeypatch.setattr(pool.scratch, "write", waits)
    with offload_for(pool) as offload:
        first, source = torch.ones(4096), torch.ones(2048)
        offload.pack(first)  # two blocks: both workers are busy
        begun.wait(10)
        packed = offload.pack(source)
        source.untyped_storage().resize_(0)
        refill = [torch.zeros(2048) for _ in range(4)]
        gate.set()
        with pytest.raises(StoreError, match="something wrote into its memory or freed it"):
            offload.unpack(packed)
        assert len(refill) == 4


def test_a_second_derivative_saves_what_it_was_given_under_its_own_name(pool: TransferPool) -> None:
    x = torch.full((2048,), 2.0, requires_grad=True)
    with offload_for(pool) as offload:
        with offload.hooks():
            y = x * 1.0
            with torch.no_grad():
                y.mul_(1.0)
            unused = y**2
            with torch.no_grad():
                y.mul_(3.0)
            z = (y**3).sum()
            del y
            (first,) = torch.autograd.grad(z, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second[0] == 36  # 6y where y is 6
        assert unused.grad_fn is not None


def test_a_forward_without_backward_leaves_nothing(pool: TransferPool) -> None:
    model = Tiny()
    with offload_for(pool, model) as offload:
        with offload.hooks():
            losses = [model(tokens()) for _ in range(3)]
        assert offload.held_bytes > 0
        losses[1].backward()
        del losses
        assert is_empty(offload, pool)


def test_no_grad_inside_moves_nothing(pool: TransferPool) -> None:
    with offload_for(pool) as offload, offload.hooks(), torch.no_grad():
        Tiny()(tokens())
        assert offload.bytes_written == 0


def test_an_exception_in_forward_leaves_nothing(pool: TransferPool) -> None:
    model = Tiny()
    with offload_for(pool, model) as offload:
        model.mlp[1].append(nn.Linear(7, 7))  # the last layer does not fit its input
        with offload.hooks(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(tokens())
        assert offload.bytes_written > 0
        assert is_empty(offload, pool)


def test_several_forwards_before_their_backwards(pool: TransferPool) -> None:
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


def test_backward_after_close_is_an_error(pool: TransferPool) -> None:
    offload = offload_for(pool)
    x = torch.randn(64, 64, requires_grad=True)
    with offload.hooks():
        y = x.exp().sum()
    offload.close()
    pool.wait_for(lambda: pool.scratch.used_bytes == 0)
    with pytest.raises(ApplyError, match=r"closed before backward asked for float32\[64, 64\]"):
        y.backward()


# Invisible to whoever records the step.


def test_an_active_dispatch_mode_does_not_see_the_engine(pool: TransferPool) -> None:
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
