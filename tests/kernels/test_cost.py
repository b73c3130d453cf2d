"""What `linear_cross_entropy` reads, writes and keeps, against arithmetic by hand and the tensors that exist."""

import gc

import pytest
import torch

from memwall.triton_kernels import linear_cross_entropy as op
from memwall.triton_kernels.linear_cross_entropy import chunk_rows_for
from memwall.triton_kernels.linear_cross_entropy._chunks import LossCall
from memwall.triton_kernels.linear_cross_entropy._cost import chunks_work, losses_work, scratch_bytes

MIB = 1 << 20


def llama(chunk_rows: int, *, want_w: bool = True) -> LossCall:
    """The head of Llama 3 at 8,192 tokens, in bf16."""
    x, w = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (8192, 128_256))
    target = torch.empty(8192, dtype=torch.int64, device="meta")
    return LossCall(x, w, target, None, -100, 0.0, 0.0, 1.0, chunk_rows, True, want_w, False)


def test_flops_are_those_of_the_gemms() -> None:
    size = 8192 * 4096 * 128_256
    assert sum(part.flops for part in chunks_work(llama(1024))) == 6 * size
    assert sum(part.flops for part in chunks_work(llama(1024, want_w=False))) == 4 * size
    assert sum(part.flops for part in losses_work(llama(1024))) == 2 * size


@pytest.mark.parametrize("chunk_rows", [256, 1024, 2048])
def test_bytes_follow_the_formula(chunk_rows: int) -> None:
    """(M / C) V H (4 + 2 b) + 12 M V, less the first read of the buffer, whose elements have b = 4 bytes."""
    head = 128_256 * 4096
    formula = 8192 // chunk_rows * head * (4 + 2 * 4) + 12 * 8192 * 128_256 - 4 * head
    assert sum(part.moved_bytes for part in chunks_work(llama(chunk_rows))) == pytest.approx(formula, rel=0.02)


def test_the_slab_is_the_scratch() -> None:
    """MiB: 501 for 2,048 rows of logits."""
    assert scratch_bytes(llama(2048)) / MIB == pytest.approx(501, abs=1)


@pytest.mark.parametrize(
    ("headroom_mib", "rows"), [(0, 256), (100, 384), (250, 896), (251, 1024), (600, 2432), (10_000, 4096)]
)
def test_chunk_for_a_headroom(headroom_mib: int, rows: int) -> None:
    """The slab fits, in steps of 128 rows; 256 rows are the least that is worth it."""
    assert chunk_rows_for(headroom_mib * MIB, 128_256, torch.bfloat16) == rows


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_saved_bytes_are_the_gradients(frozen: bool, reduction: str) -> None:
    """That of the input in bf16, and of the head as it is added up, in fp32; nothing where they wait for backward."""
    x = torch.randn(24, 32, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(200, 32, dtype=torch.bfloat16, requires_grad=not frozen)
    target = torch.randint(0, 200, (24,))
    inputs = {t.untyped_storage().data_ptr() for t in (x, w, target)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in inputs:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op(x, w, target, reduction=reduction, chunk_rows=8)  # type: ignore[arg-type]
    expected = 0 if reduction == "none" else 24 * 32 * 2 + (0 if frozen else 200 * 32 * 4)
    assert sum(t.nbytes for t in saved.values()) == expected
    saved.clear()
    gc.collect()
