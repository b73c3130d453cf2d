"""`FusedAdamW` on a GPU: the CPU's bits, no waiting, graphs, the right device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memwall.triton_kernels import FusedAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.requires("triton")]

SHAPES = [(512, 1024), (33,), (16, 16), (17, 241), (1024,), (0,)]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stochastic": {"stochastic_rounding": True, "seed": 7},
    "8-bit": {"moment_bits": 8},
    "8-bit-stochastic-clipped": {"moment_bits": 8, "stochastic_rounding": True, "max_norm": 3.0},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def make(device: str, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], FusedAdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    return params, FusedAdamW(params, **options)


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.copy_(gradient)


def trained(device: str, dtype: torch.dtype, num_steps: int = 3, **options: Any) -> list[Tensor]:
    params, optimizer = make(device, dtype, **options)
    for step in range(num_steps):
        give_gradients(params, step)
        optimizer.step()
    state = [value for p in params for value in optimizer.state[p].values()]
    return [*(p.detach().cpu() for p in params), *(value.cpu() for value in state)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_has_the_cpus_bits(kind: dict[str, Any], dtype: torch.dtype) -> None:
    found, expected = trained("cuda", dtype, **kind), trained("cpu", dtype, **kind)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_host_never_waits(kind: dict[str, Any]) -> None:
    """Also when gradients have new addresses, and when one is missing."""
    params, optimizer = make("cuda", torch.bfloat16, **kind)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    gradients = [torch.randn_like(p) for p in params]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        params[0].grad = None
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[params[1]]["step"] == 4


def test_a_graph_captures_it(kind: dict[str, Any]) -> None:
    """Every replay is a step of its own: the number of the step is counted on the device."""
    lr = torch.tensor(1e-2, device="cuda")
    params, optimizer = make("cuda", torch.bfloat16, lr=lr, **kind)
    others, other = make("cuda", torch.bfloat16, lr=lr, **kind)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        give_gradients(params, 0)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    give_gradients(others, 0)
    other.step()
    for step in range(1, 4):
        lr.fill_(1e-2 / step)
        for run, tensors in ((graph.replay, params), (other.step, others)):
            give_gradients(tensors, step)
            run()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert optimizer.state[params[0]]["step"] == 4


def test_launches_on_the_tensors_device(kind: dict[str, Any]) -> None:
    """Liger #401; triton #5205, #2441."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        found, expected = trained("cuda:1", torch.bfloat16, **kind), trained("cuda:0", torch.bfloat16, **kind)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
