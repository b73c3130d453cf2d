"""Which attention kernel a device takes, and what the step then saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.attention import AttentionCall, attention_kernel
from memwall.predict.cuda.attention_calls import AttentionCalls, attention_calls
from memwall.predict.cuda.translate import not_modelled
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

BATCH, HEADS, TOKENS, SIZE = 2, 4, 80, 16
WIDTH = HEADS * SIZE

pytestmark = pytest.mark.usefixtures("one_thread")


def call(dtype: str = "bfloat16", size: int = 64, **changes: Any) -> AttentionCall:
    shape = (2, 8, 128, size)
    return AttentionCall(**{"dtype": dtype, "query": shape, "key": shape, "value": shape, **changes})


H100, A100, L4, T4, V100, B200, RTX_5090 = (9, 0), (8, 0), (8, 9), (7, 5), (7, 0), (10, 0), (12, 0)
MASK = (2, 1, 128, 128)
SHORT = (2, 8, 64, 64)
FEW_HEADS = (2, 2, 128, 64)


@pytest.mark.parametrize(
    ("capability", "asked", "kernel"),
    [
        (H100, call(), "cudnn"),
        (B200, call("float16"), "cudnn"),
        (H100, call(mask=MASK), "cudnn"),
        (H100, call(mask=MASK, mask_needs_gradient=True), "efficient"),
        (H100, call(mask=(2, 3, 128, 128)), "efficient"),
        (H100, call(dropout=0.1), "flash"),  # cuDNN counts in sixteenths
        (H100, call(dropout=0.125), "cudnn"),
        (H100, call(size=256), "flash"),
        (H100, call(size=100), "flash"),
        (H100, call(size=512), "efficient"),
        (H100, call("float32"), "efficient"),
        (H100, call("float64"), "math"),
        (H100, call(query=(8, 128, 64), key=(8, 128, 64), value=(8, 128, 64)), "math"),
        (H100, call(is_last_dim_dense=False), "math"),
        (H100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "cudnn"),
        (A100, call(), "flash"),
        (A100, call(mask=MASK), "efficient"),
        (A100, call(is_causal=True), "flash"),
        (A100, call(is_causal=True, key=SHORT, value=SHORT), "efficient"),
        (A100, call(size=256), "flash"),
        (A100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "flash"),
        (A100, call(key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True, mask=MASK), "math"),
        (A100, call("float32", key=FEW_HEADS, value=FEW_HEADS, enable_gqa=True), "math"),
        (A100, call("float32", size=66), "math"),  # not a multiple of 4
        (L4, call(size=256), "flash"),
        (L4, call(size=256, dropout=0.1), "efficient"),
        (L4, call(size=224), "efficient"),
        (L4, call(size=224, needs_gradient=False), "flash"),
        (RTX_5090, call(), "flash"),
        (T4, call("float16"), "efficient"),
        (T4, call("float16", size=68), "math"),  # its matrix units want multiples of 8
        (T4, call("float32", size=66), "efficient"),
        (V100, call("bfloat16"), "math"),
    ],
)
def test_the_kernel_is_the_one_torch_would_take(capability: tuple[int, int], asked: AttentionCall, kernel: str) -> None:
    assert attention_kernel(asked, capability) == kernel


def test_in_torch_2_11_cudnn_takes_any_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert attention_kernel(call(dropout=0.1), H100) == "cudnn"


def test_a_kernel_that_is_switched_off_is_not_taken() -> None:
    assert attention_kernel(call(), H100, frozenset(("flash", "math"))) == "flash"
    assert attention_kernel(call(), H100, frozenset(("math",))) == "math"


@pytest.mark.parametrize(
    ("dtype", "device", "operator", "logsumexp_rows"),
    [
        (torch.bfloat16, "h100-80gb", "_scaled_dot_product_cudnn_attention", TOKENS),
        (torch.bfloat16, "a100-80gb", "_scaled_dot_product_flash_attention", TOKENS),
        (torch.float32, "a100-80gb", "_scaled_dot_product_efficient_attention", 96),  # padded to 32
    ],
)
def test_attention_saves_what_the_device_kernel_saves(
    dtype: torch.dtype,
    device: str,
    operator: str,
    logsumexp_rows: int,
    attending: Callable[..., Trace],
    numbers_of: Callable[..., list[int]],
    new_bytes: Callable[..., list[int]],
) -> None:
    trace = attending(dtype, device, is_causal=True)
    result, logsumexp, *seeds = sorted(new_bytes(trace, operator), reverse=True)
    assert result == BATCH * TOKENS * WIDTH * dtype.itemsize
    assert logsumexp == 4 * BATCH * HEADS * logsumexp_rows
    assert sum(seeds) <= 32
    assert numbers_of(trace, trace.steps[-1], f"{operator}_backward")


def test_on_rocm_attention_stays_the_cpu_kernel(
    attending: Callable[..., Trace], numbers_of: Callable[..., list[int]]
) -> None:
    trace = attending(torch.bfloat16, "mi300x", is_causal=True)
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_flash_attention_for_cpu")
    assert any("attention kernels" in line for line in not_modelled(trace, hardware_named("mi300x")))


def test_a_mask_of_truths_becomes_numbers_and_is_saved(
    attending: Callable[..., Trace], numbers_of: Callable[..., list[int]]
) -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    trace = attending(torch.float32, "a100-80gb", attn_mask=mask)
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_efficient_attention")
    assert 4 * TOKENS * TOKENS in [save.nbytes // (BATCH * HEADS) for save in trace.steps[-1].saved]


def test_a_mask_whose_rows_are_not_dense_has_no_fused_kernel(attending: Callable[..., Trace]) -> None:
    """As T5's position bias in transformers 5.17; source: sdp_utils_cpp.h, `check_last_dim_stride_equals_1_dense`."""
    trace = attending(torch.float32, "h100-80gb", attn_mask=torch.zeros(TOKENS, TOKENS).t())
    assert not any("efficient" in name for name in trace.names)
    assert any("softmax" in name for name in trace.names)


def test_grouped_queries_in_float32_are_written_out(attending: Callable[..., Trace]) -> None:
    """GIVEN fewer keys than queries in float32 THEN no fused kernel takes them, and the weights exist in full."""
    trace = attending(torch.float32, "a100-80gb", key_heads=2, enable_gqa=True)
    weights_bytes = 4 * BATCH * HEADS * TOKENS * TOKENS
    assert not any("attention" in name for name in trace.names)
    assert any(storage.nbytes == weights_bytes for storage in trace.steps[-1].storages)


class TwoKinds(nn.Module):
    """Attention twice over, the second time with heads of a size that no fused kernel takes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = Heads(SIZE), Heads(SIZE + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x) + self.even(x) + self.even(x)


class Heads(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * HEADS * size)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer(x).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(*parts).sum((1, 3), keepdim=True).squeeze(1)


@pytest.mark.parametrize(
    ("device", "even", "odd"),
    [("a100-80gb", "efficient", "math"), ("t4", "efficient", "efficient"), ("mi300x", "cpu", "cpu")],
)
def test_the_trace_says_which_kernel_each_call_took(
    device: str,
    even: str,
    odd: str,
    workload_of: Callable[..., Workload],
    recorded: Callable[..., Trace],
) -> None:
    """The math kernel too, which has no operator; of many micro-batches two are recorded, and all are counted."""
    trace = recorded(workload_of(TwoKinds, lambda: torch.ones(BATCH, TOKENS, WIDTH)), device)
    for step in trace.steps:
        assert attention_calls(trace, step, num_micro_batches=4) == (
            AttentionCalls(module="odd", kernel=odd, num_calls=4),
            AttentionCalls(module="even", kernel=even, num_calls=8),
        )


def test_multihead_attention_of_torch_takes_the_device_kernel_as_well(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace], numbers_of: Callable[..., list[int]]
) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    trace = recorded(workload_of(Encoder, lambda: torch.ones(BATCH, TOKENS, WIDTH), torch.bfloat16), "a100-80gb")
    assert numbers_of(trace, trace.steps[-1], "_scaled_dot_product_flash_attention")
