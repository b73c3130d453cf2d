"""cuDNN itself answers without a device: from a card's properties, its choice of engines and their workspaces."""

import pytest
import torch


def workspace_bytes(dtype: torch.dtype = torch.float32) -> int:
    """Returns what a convolution's forward holds beside its result."""
    x = torch.zeros(32, 64, 56, 56, device="cuda", dtype=dtype)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = layer(x)
    return torch.cuda.max_memory_allocated() - before - y.nbytes


@pytest.mark.phantom(numbers=False)
def test_without_cudnns_own_choice_a_workspace_has_no_bytes() -> None:
    assert workspace_bytes() == 0


@pytest.mark.parametrize(
    "card", [pytest.param(c, marks=pytest.mark.phantom(card=c)) for c in ("h100-80gb", "a100-40gb", "l4", "t4")]
)
@pytest.mark.phantom(cudnn="real", numbers=False)
def test_cudnns_own_choice_asks_for_a_workspace_on_every_card(card: str) -> None:
    """Without channels last its kernels take x and y in another layout: 25.7 MB each way in float32."""
    found = workspace_bytes()
    assert 0 < found < 128 << 20
    if card == "h100-80gb":
        assert found % 512 == 0
        assert found > workspace_bytes(torch.bfloat16) // 2 > 0


@pytest.mark.phantom(card="h100-80gb", cudnn="real", numbers=False)
def test_kernels_that_cudnn_compiles_as_it_runs_are_among_its_choices() -> None:
    """A real H100 held these bytes in the weight's gradient of a ConvNeXt's depthwise convolution in bfloat16.

    cuDNN rules such kernels out where the driver lacks a function that links them.
    """
    x = torch.zeros(96, 320, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.zeros(320, 1, 7, 7, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight, padding=3, groups=320)
    gradient = torch.ones_like(y)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y.backward(gradient)
    held = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert held - weight.nbytes == 48_168_960


@pytest.mark.phantom(card="h100-80gb", cudnn="real", numbers=False)
def test_cudnn_has_an_engine_for_attention() -> None:
    query = torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        y = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    y.backward(torch.zeros_like(y))
    assert query.grad is not None
    assert query.grad.shape == query.shape


@pytest.mark.phantom(cudnn="real")
def test_values_are_the_cpus_whatever_cudnn_chooses() -> None:
    layer = torch.nn.Conv2d(4, 4, 3)
    x = torch.randn(2, 4, 8, 8)
    there = torch.nn.Conv2d(4, 4, 3).cuda()
    there.load_state_dict(layer.state_dict())
    y = there(x.cuda())
    y.sum().backward()
    assert torch.equal(y.cpu(), layer(x))
    assert there.weight.grad is not None
