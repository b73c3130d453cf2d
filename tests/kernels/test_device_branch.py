"""The GPU's branch of the chunk loop on meta tensors: calls that exist, dtypes that fit, bytes as the cost says.

The row kernel is left out; test_interpreter.py has that.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.machine.hardware import hardware_named
from memwall.triton_kernels.linear_cross_entropy import LossShape, cost
from memwall.triton_kernels.linear_cross_entropy import _chunks as chunks
from memwall.triton_kernels.linear_cross_entropy._ops import sum_op


class Meter(TorchDispatchMode):
    """Live bytes of whatever is allocated inside, and matmuls by the dtype of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.seen: set[int] = set()
        self.matmuls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {id(t.untyped_storage()) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.matmuls.append((str(func), result.dtype))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in inputs | self.seen:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        self.seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live_bytes -= size


@pytest.fixture
def device_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_row_loss", lambda x: lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


def forward(dtype: torch.dtype, chunk_rows: int, max_valid_rows: int | None, want_w: bool, bias: bool) -> Meter:
    x = torch.empty(4096, 512, dtype=dtype, device="meta")
    w = torch.empty(32_000, 512, dtype=dtype, device="meta")
    target = torch.empty(4096, dtype=torch.int64, device="meta")
    b = torch.empty(32_000, dtype=dtype, device="meta") if bias else None
    with Meter() as meter:
        kept = sum_op._init_fn(
            x,
            w,
            target,
            b,
            None,
            -100,
            0.0,
            0.0,
            0.0,
            1.0,
            chunk_rows,
            max_valid_rows,
            torch.float32,
            True,
            want_w,
            bias,
        )
    del kept
    return meter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("max_valid_rows", [None, 3000])
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_is_summed_in_fp32(
    device_branch: None, dtype: torch.dtype, max_valid_rows: int | None, bias: bool
) -> None:
    meter = forward(dtype, 1024, max_valid_rows, True, bias)
    num_chunks = 4 if max_valid_rows is None else 3
    assert len(meter.matmuls) == 3 * num_chunks
    assert sum(found == torch.float32 for _, found in meter.matmuls) == (
        3 * num_chunks if dtype == torch.float32 else num_chunks
    )


@pytest.mark.parametrize("want_w", [False, True])
@pytest.mark.parametrize("chunk_rows", [512, 2048])
@pytest.mark.parametrize("max_valid_rows", [None, 2048])
def test_peak_is_the_costs(device_branch: None, want_w: bool, chunk_rows: int, max_valid_rows: int | None) -> None:
    meter = forward(torch.bfloat16, chunk_rows, max_valid_rows, want_w, False)
    shape = LossShape(
        num_rows=4096,
        hidden_size=512,
        vocabulary_size=32_000,
        chunk_rows=chunk_rows,
        num_used_rows=max_valid_rows,
        wants_weight_gradient=want_w,
    )
    forecast = cost(shape, torch.bfloat16, hardware_named("h200"))
    backward_bytes = forecast.saved_bytes + 4096 * 512 * 2 + (32_000 * 512 * 2 if want_w else 0)
    assert forecast.transient_bytes == pytest.approx(max(meter.peak_bytes, backward_bytes), rel=0.02)
