"""What the planner is told a kernel costs, against arithmetic by hand and against the tensors that exist."""

import gc
from typing import Any

import pytest
import torch

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import linear_cross_entropy as op
from memwall.triton_kernels.cost import Calibration
from memwall.triton_kernels.linear_cross_entropy import LossShape, chunk_rows_for, cost

H200 = hardware_named("h200")
MIB = 1 << 20


def llama(chunk_rows: int, **change: Any) -> LossShape:
    """The head of Llama 3 at 8,192 tokens."""
    return LossShape(num_rows=8192, hidden_size=4096, vocabulary_size=128_256, chunk_rows=chunk_rows, **change)


def test_flops_are_those_of_the_gemms() -> None:
    size = 8192 * 4096 * 128_256
    assert cost(llama(1024), torch.bfloat16, H200).flops == 6 * size
    assert cost(llama(1024, wants_weight_gradient=False), torch.bfloat16, H200).flops == 4 * size
    assert cost(llama(1024, recompute=True), torch.bfloat16, H200).flops == 8 * size
    half = cost(llama(1024, num_used_rows=4096), torch.bfloat16, H200)
    assert half.flops == 3 * size


@pytest.mark.parametrize("chunk_rows", [256, 1024, 2048])
@pytest.mark.parametrize("accum_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_follow_the_formula(chunk_rows: int, accum_dtype: torch.dtype) -> None:
    """(M / C) V H (4 + 2 b) + 12 M V, less the first read of the buffer, and the pass that rounds it in backward."""
    b = accum_dtype.itemsize
    head = 128_256 * 4096
    formula = 8192 // chunk_rows * head * (4 + 2 * b) + 12 * 8192 * 128_256
    found = cost(llama(chunk_rows, accum_dtype=accum_dtype), torch.bfloat16, H200).bytes_moved
    assert found == pytest.approx(formula - b * head + (b + 2) * head, rel=0.02)


def test_memory_of_the_published_shape() -> None:
    """MiB: slab 501, gradient of the input 64, of the head 1,002 in bf16 or 2,004 in fp32."""
    own = cost(llama(2048, accum_dtype=torch.bfloat16), torch.bfloat16, H200)
    wide = cost(llama(2048), torch.bfloat16, H200)
    assert own.saved_bytes / MIB == pytest.approx(64 + 1002, abs=1)
    assert wide.saved_bytes / MIB == pytest.approx(64 + 2004, abs=1)
    # In backward the result stands beside what it is made from; that is more than the slab was.
    assert wide.transient_bytes / MIB == pytest.approx(64 + 2004 + 64 + 1002, abs=1)
    frozen = cost(llama(2048, wants_weight_gradient=False), torch.bfloat16, H200)
    assert frozen.transient_bytes / MIB == pytest.approx(64 + 501, abs=1)


def test_seconds_are_bound_by_what_binds() -> None:
    slow, fast = (cost(llama(rows), torch.bfloat16, H200).seconds for rows in (256, 4096))
    floor = 6 * 8192 * 4096 * 128_256 / H200.flops["bfloat16"]
    assert floor < fast < 1.2 * floor < slow
    calibration = Calibration(copy_efficiency=0.9, matmul_efficiency=0.5, launch_seconds=1e-6)
    calibrated = cost(llama(4096), torch.bfloat16, H200, calibration=calibration)
    assert calibrated.seconds > 1.8 * fast


def test_eager_holds_the_logits_and_the_operator_does_not() -> None:
    found = cost(llama(1024, wants_weight_gradient=False), torch.bfloat16, H200)
    assert found.eager is not None
    assert found.eager.saved_bytes == 4 * 8192 * 128_256
    assert found.eager.transient_bytes == 10 * 8192 * 128_256
    assert found.transient_bytes < found.eager.transient_bytes / 10


@pytest.mark.parametrize(
    ("headroom_mib", "rows"), [(0, 256), (100, 384), (250, 896), (251, 1024), (600, 2432), (10_000, 4096)]
)
def test_chunk_for_a_headroom(headroom_mib: int, rows: int) -> None:
    """The slab fits, in steps of 128 rows; 256 rows are the least that is worth it."""
    assert chunk_rows_for(headroom_mib * MIB, 128_256, torch.bfloat16) == rows


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_saved_bytes_are_what_autograd_saves(frozen: bool, recompute: bool) -> None:
    shape = LossShape(
        num_rows=24,
        hidden_size=32,
        vocabulary_size=200,
        chunk_rows=8,
        wants_weight_gradient=not frozen,
        recompute=recompute,
    )
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
        op(x, w, target, reduction="sum", chunk_rows=8, recompute=recompute)
    assert sum(t.nbytes for t in saved.values()) == cost(shape, torch.bfloat16, H200).saved_bytes
    saved.clear()
    gc.collect()


def test_unknown_rate_and_impossible_sizes_are_named() -> None:
    with pytest.raises(UsageError, match=r"no rate is known for torch\.float64 on h200; known are"):
        cost(llama(1024), torch.float64, H200)
    with pytest.raises(UsageError, match=r"sizes must be positive"):
        cost(llama(0), torch.bfloat16, H200)
