"""What CUDA operators allocate for themselves, in bytes that can be added up by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import not_modelled
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

BATCH, HEADS, TOKENS, SIZE = 2, 4, 80, 16

pytestmark = pytest.mark.usefixtures("one_thread")


def test_flash_backward_sums_in_float32(attending: Callable[..., Trace], workspace_of: Callable[..., int]) -> None:
    """80 tokens rounded to 128, heads of 16 to 32; and a row of sums."""
    expected = 4 * BATCH * HEADS * 128 * (32 + 1)
    name = "_scaled_dot_product_flash_attention_backward"
    assert workspace_of(attending(torch.bfloat16, "a100-80gb"), name) == expected


def test_flash_backward_has_a_gradient_per_query_head(
    attending: Callable[..., Trace], workspace_of: Callable[..., int]
) -> None:
    trace = attending(torch.bfloat16, "a100-80gb", key_heads=2, enable_gqa=True)
    expanded = 2 * BATCH * TOKENS * HEADS * SIZE * 2
    expected = 4 * BATCH * HEADS * 128 * (32 + 1) + expanded
    assert workspace_of(trace, "_scaled_dot_product_flash_attention_backward") == expected


def test_efficient_backward_sums_in_tiles(attending: Callable[..., Trace], workspace_of: Callable[..., int]) -> None:
    """Two tiles of 64 x 64 for each head, and a number per row."""
    tiles = 2 * BATCH * HEADS * (16 + 4 * 64 * 64)
    name = "_scaled_dot_product_efficient_attention_backward"
    assert workspace_of(attending(torch.float32, "a100-80gb"), name) == tiles + 4 * BATCH * HEADS * TOKENS


def test_cudnn_backward_sums_in_float32(attending: Callable[..., Trace], workspace_of: Callable[..., int]) -> None:
    expected = 4 * BATCH * HEADS * TOKENS * (SIZE + 1)
    name = "_scaled_dot_product_cudnn_attention_backward"
    trace = attending(torch.bfloat16, "h100-80gb")
    assert workspace_of(trace, name) == expected
    assert any("cuDNN's attention" in line for line in not_modelled(trace, hardware_named("h100-80gb")))


def test_the_gradient_of_a_bias_takes_scratch_that_grows_with_the_multiprocessors(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """Rows go to as many blocks as have 16 each, 197 or what fills the device, of 4 x 32 threads, in six columns."""
    workload = workload_of(
        lambda: nn.Linear(8, 768),
        lambda: torch.zeros(12608, 8),
        loss=lambda model, batch: model(batch).square().sum(),
    )

    def blocks_on(device: str) -> list[int]:
        trace = recorded(workload, device)
        step = trace.steps[-1]
        at = next(n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.sum.dim_IntList")
        return [s.nbytes for s in step.storages if s.birth == at and s.dtype == "uint8" and s.death == at + 1]

    assert blocks_on("h100-80gb") == blocks_on("a100-80gb") == [4 * 768 * 197 * 4 * 32, 4 * 6]
    assert blocks_on("l4") == [4 * 768 * (58 * 12 // 6) * 4 * 32, 4 * 6]
    assert not blocks_on("mi300x")


def test_statistics_of_a_layer_norm_are_in_float32(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    trace = recorded(workload_of(lambda: nn.LayerNorm(16), lambda: torch.zeros(100, 16), torch.bfloat16), "h100-80gb")
    step = trace.steps[-1]
    at = next(n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.native_layer_norm.default")
    assert [(s.nbytes, s.dtype) for s in step.storages if s.birth == at][1:] == [(400, "float32")] * 2


def test_statistics_of_a_batch_norm_under_autocast_are_in_float32(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """Source: aten/src/ATen/native/cuda/Normalization.cu, `batch_norm_cuda`."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().sum()

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16))

    trace = recorded(workload_of(model, lambda: torch.zeros(4, 3, 8, 8), loss=loss), "h100-80gb")
    step = trace.steps[-1]
    at = next(n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.native_batch_norm.default")
    assert [(s.nbytes, s.dtype) for s in step.storages if s.birth == at][1:] == [(64, "float32")] * 2


def test_a_dropout_allocates_its_mask_first(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1))

    trace = recorded(workload_of(model, lambda: torch.zeros(100, 8)), "h100-80gb")
    step = trace.steps[-1]
    at = next(n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.native_dropout.default")
    assert [s.dtype for s in step.storages if s.birth == at] == ["bool", "float32"]


def test_the_copy_of_a_turned_input_is_made_before_the_results(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """A result of the input's size gets the next piece: which of the two is free afterwards decides about segments."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2))

    trace = recorded(workload_of(Turned, lambda: torch.zeros(100, 16, 8)), "h100-80gb")
    step = trace.steps[-1]
    at = next(n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.native_layer_norm.default")
    assert [s.dtype for s in step.storages if s.birth == at] == ["uint8", "float32", "float32", "float32"]


def test_the_backward_of_indexing_sorts_positions(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50, 8))

        def forward(self, rows: Tensor) -> Tensor:
            return self.weight[rows] * 2

    def sorted_bytes() -> int:
        workload = workload_of(Picked, lambda: torch.zeros(30, dtype=torch.int64))
        trace = recorded(workload, "a100-80gb")
        step = trace.steps[-1]
        puts = [n for n, op in enumerate(step.ops) if "index_put" in trace.names[op.name]]
        assert len(puts) == 1
        outputs = step.ops[puts[0]].outputs
        return sum(s.nbytes for i, s in enumerate(step.storages) if s.birth == puts[0] and i not in outputs)

    assert sorted_bytes() == 4 * 8 * 30
