"""Offloaded activations that share memory, are written, or become gradients: what was saved is what comes back."""

import threading
from pathlib import Path

import pytest
import torch
from faulty_disk import Gate
from offload_engines import KIB, GradientIsSaved, Pool, a_pool, is_empty, offload_for
from torch.multiprocessing.reductions import StorageWeakRef

from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.blocks.executor import BlockCall
from memwall.apply.offload.proving import Proving
from memwall.errors import ApplyError, StoreError
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.predict.process import TENSOR_HEAP
from memwall.torch_internals.saved import SavedTensorModifiedError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("min_bytes", [1024, 1 << 20], ids=["moved", "kept"])
def test_an_in_place_write_after_the_save_raises(pool: Pool, min_bytes: int) -> None:
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


def test_a_source_may_be_freed_and_its_address_used_again(pool: Pool) -> None:
    with offload_for(pool) as offload:
        packed = []
        for value in range(20):
            source = torch.full((4096,), float(value))
            packed.append(offload.pack(source))
            del source
        assert [offload.unpack(item)[7].item() for item in packed] == [float(value) for value in range(20)]


def test_a_write_in_place_between_two_saves_makes_two_copies(pool: Pool) -> None:
    with offload_for(pool) as offload:
        source = torch.zeros(4096)
        first = offload.pack(source)
        source.add_(1)
        second = offload.pack(source)
        assert offload.num_held == 2
        assert offload.unpack(second)[0] == 1
        with pytest.raises(SavedTensorModifiedError):
            offload.unpack(first)


def test_a_proof_reads_back_what_it_compares_alone(pool: Pool) -> None:
    """GIVEN a result that is saved twice WHEN the proof looks at what has left THEN nothing older comes along."""
    with offload_for(pool) as offload:
        older, x = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
        with offload.group("older"), offload.hooks():
            first = older.exp().sum()
        call = BlockCall(("block", 0), BlockCounts())
        with offload.group("block"), Proving(offload, call).hooks():
            second = x.exp().square().sum()
        assert offload.bytes_read == x.nbytes
        (first + second).backward()
        assert not call.counts.stays
        assert older.grad is not None
        assert x.grad is not None
        assert torch.equal(older.grad, older.detach().exp())
        assert torch.allclose(x.grad, 2 * (2 * x.detach()).exp())


@pytest.mark.slow
def test_views_of_one_storage_move_once_and_come_back_with_their_strides(pool: Pool) -> None:
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


def test_a_small_view_moves_only_its_own_range(pool: Pool) -> None:
    with offload_for(pool) as offload:
        base = torch.randn(100, 1024)
        packed = [offload.pack(base[10:15]), offload.pack(base[50:60, ::2])]
        assert offload.bytes_written < 64 * KIB
        assert torch.equal(offload.unpack(packed[0]), base[10:15])
        assert torch.equal(offload.unpack(packed[1]), base[50:60, ::2])


def test_an_expanded_tensor_moves_its_base(pool: Pool) -> None:
    with offload_for(pool) as offload:
        wide = torch.randn(1, 1024).expand(500, 1024)
        packed = offload.pack(wide)
        assert offload.bytes_written == 4096
        back = offload.unpack(packed)
        assert torch.equal(back, wide)
        assert back.stride() == wide.stride() == (0, 1)


@pytest.mark.parametrize("window_bytes", [16 * KIB, 1 << 20])
def test_what_becomes_a_gradient_may_be_written_and_what_was_saved_stays(pool: Pool, window_bytes: int) -> None:
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


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason="what malloc gave is copied at once")
def test_a_storage_freed_behind_autograds_back_is_an_error_not_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with a_pool(tmp_path, TENSOR_HEAP, monkeypatch, backend=gate.backend) as pool, offload_for(pool) as offload:
        first, source = torch.ones(4096), torch.ones(2048)
        offload.pack(first)
        while gate.num_waiting < 2:  # both workers are busy
            threading.Event().wait(0.01)
        packed = offload.pack(source)
        source.untyped_storage().resize_(0)
        refill = [torch.zeros(2048) for _ in range(4)]
        gate.event.set()
        with pytest.raises(StoreError, match="something wrote into its memory or freed it"):
            offload.unpack(packed)
        assert len(refill) == 4


def test_a_second_derivative_saves_what_it_was_given_under_its_own_name(pool: Pool) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("min_bytes", [1024, 1 << 20], ids=["moved", "kept"])
def test_a_forward_without_a_backward_leaves_nothing_behind(pool: Pool, min_bytes: int) -> None:
    """GIVEN an operation that saves its own result, as of an evaluation with gradients on THEN all of it is freed."""
    x = torch.randn(2048, requires_grad=True)
    with offload_for(pool, min_bytes=min_bytes) as offload:
        with offload.hooks():
            result = x.exp()
        storage = StorageWeakRef(result.untyped_storage())
        del result
        assert is_empty(offload, pool)
        assert storage.expired()
