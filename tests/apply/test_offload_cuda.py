"""Activations of a CUDA device in pinned host memory: the same bits, bounded device memory, exact pinned bytes."""

import mmap
from contextlib import nullcontext

import pytest
import torch

from memwall.apply.offload.engine import ActivationOffload
from memwall.errors import StoreError
from memwall.store.pinned_arena import PinnedArena

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 1 << 20


def gradient(offload: ActivationOffload | None, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns the gradient through 40 chained products [512, 512], and what forward leaves allocated of its own."""
    (torch.zeros(1, 1, device="cuda") @ torch.zeros(1, 1, device="cuda")).sum()  # cuBLAS has its workspace now
    before_bytes = torch.cuda.memory_allocated()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(512, 512, device="cuda", dtype=dtype, generator=generator).div_(23).requires_grad_()
    with offload.hooks() if offload is not None else nullcontext():
        y = x
        for _ in range(40):
            y = (y @ x).sin()
    allocated_bytes = torch.cuda.memory_allocated() - before_bytes
    y.float().square().sum().backward()
    assert x.grad is not None
    return x.grad, allocated_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_bytes", [MIB // 16, 2 * MIB, 64 * MIB])
def test_gradients_are_bitwise_equal_and_device_memory_falls(dtype: torch.dtype, window_bytes: int) -> None:
    plain, plain_bytes = gradient(None, dtype)
    with ActivationOffload(
        None, window_bytes=window_bytes, min_bytes=1 << 16, is_excluded=lambda tensor: False
    ) as offload:
        for _ in range(3):
            offloaded, offloaded_bytes = gradient(offload, dtype)
            assert torch.equal(plain, offloaded)
        assert offload.num_held == 0
        assert offload.bytes_written > 0
        if window_bytes < 64 * MIB:
            assert offloaded_bytes < plain_bytes / 2


def test_dropped_prefetches_do_not_write_into_reused_memory() -> None:
    with ActivationOffload(None, window_bytes=16 * MIB, is_excluded=lambda tensor: False) as offload:
        for _ in range(20):
            with offload.group("a"):
                packed = [offload.pack(torch.ones(1 << 20, device="cuda")) for _ in range(16)]
            offload.prefetch("a")
            del packed
            assert offload.num_held == 0
            zeros = [torch.zeros(1 << 20, device="cuda") for _ in range(16)]
            assert not torch.stack(zeros).any()


def test_what_cannot_be_pinned_stays_on_the_device() -> None:
    """GIVEN a limit that the second tensor passes THEN it stays, and gradients are those of a plain run."""

    def gradient_of(offload: ActivationOffload | None) -> torch.Tensor:
        x = torch.linspace(0, 1, 1 << 18, device="cuda").requires_grad_()
        with offload.hooks() if offload is not None else nullcontext():
            y = x.sin().cos().tanh().sigmoid()
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient_of(None)
    with ActivationOffload(None, is_excluded=lambda tensor: False, host_limit_bytes=MIB) as offload:
        assert torch.equal(gradient_of(offload), plain)
        assert offload.bytes_written == MIB
        assert "raise --host" in offload.refusal
        assert offload.failure is None


def test_the_pinned_limit_is_kept_and_named() -> None:
    arena = PinnedArena(limit_bytes=8 * MIB)
    slots = [arena.allocate(4 * MIB), arena.allocate(4 * MIB)]
    assert arena.pinned_bytes == 8 * MIB
    assert all(slot.memory.is_pinned() for slot in slots)
    with pytest.raises(StoreError, match=r"8\.0 MiB of the limit of 8\.0 MiB are pinned already; raise --host"):
        arena.allocate(1)
    for slot in slots:
        arena.free(slot)
    arena.close()


def test_a_refusal_of_the_driver_is_no_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN memory that is pinned already WHEN it is to be pinned once more THEN that alone fails."""
    memory = mmap.mmap(-1, MIB)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: memory)
    first, second = PinnedArena(None, chunk_bytes=0), PinnedArena(None, chunk_bytes=0)
    first.allocate(MIB)
    with pytest.raises(StoreError, match="refuses to pin"):
        second.allocate(MIB)
    assert torch.ones(4, device="cuda").sum().item() == 4
    first.close()
