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


@pytest.mark.parametrize(("tokens", "num_segments"), [(3072, None), (4096, 1000)])
def test_an_embedding_with_many_indices_sorts_them(
    tokens: int,
    num_segments: int | None,
    workload_of: Callable[..., Workload],
    recorded: Callable[..., Trace],
    workspace_of: Callable[..., int],
) -> None:
    def traced() -> Trace:
        workload = workload_of(
            lambda: nn.Embedding(1000, 32), lambda: torch.zeros(1, tokens, dtype=torch.int64), torch.bfloat16
        )
        return recorded(workload, "a100-80gb")

    expected = 0
    if num_segments is not None:
        partial = tokens // 10 + num_segments
        expected = 8 * (2 * tokens + tokens + 2 * num_segments + partial) + 4 * 32 * partial
    found = workspace_of(traced(), "embedding_dense_backward")
    # The gradient of a sum is one number seen everywhere: it is made contiguous first.
    assert found - expected in (0, 2 * tokens * 32)


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
