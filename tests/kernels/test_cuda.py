"""What only a GPU can show; tests/kernels/test_interpreter.py shows the rest without one."""

from typing import Any

import pytest
import torch
from phantom_processes import is_phantom

from memwall.triton_kernels import linear_cross_entropy
from memwall.triton_kernels.scaled_copy import scaled_copy

pytestmark = [pytest.mark.gpu, pytest.mark.requires("triton")]


def on_gpu(p: Any, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return p.x.to(device).requires_grad_(), p.w.to(device).requires_grad_(), p.target.to(device)


def step(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> None:
    linear_cross_entropy(x, w, target, chunk_rows=64).backward()


@pytest.fixture
def problem(losses: Any) -> Any:
    return losses.make(rows=256, hidden=64, vocabulary=1000, dtype=torch.bfloat16, ignored="some")


@pytest.mark.phantom(numbers=False)
def test_the_host_never_waits(problem: Any) -> None:
    inputs = on_gpu(problem)
    step(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert inputs[0].grad is not None


@pytest.mark.skipif(is_phantom(), reason="a graph that is replayed computes nothing on the phantom device")
def test_a_graph_captures_it(problem: Any) -> None:
    x, w, target = on_gpu(problem)
    step(x, w, target)
    expected = x.grad.clone()
    x.grad, w.grad = None, None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, w, target)
    graph.replay()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scaled_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    source, factor = torch.randn(5000, device="cuda"), torch.tensor(1.0 / 8191, device="cuda")
    for values in (source, source.to(dtype)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = scaled_copy(values, factor, dtype)
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() > before
        assert torch.equal(found, (values.float() * factor).to(dtype))
        del found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_agrees_with_the_cpu(losses: Any, dtype: torch.dtype) -> None:
    p = losses.make(rows=256, hidden=64, vocabulary=1000, dtype=dtype, ignored="some")
    truth = losses.truth(p)
    x, w, target = on_gpu(p)
    loss = linear_cross_entropy(x, w, target, chunk_rows=64)
    loss.backward(torch.tensor(0.5, device="cuda"))
    assert abs(loss.double().cpu() - truth.loss) < 5e-3 * truth.loss.abs()
    for ours, name in ((x.grad, "x"), (w.grad, "w")):
        error = (ours.double().cpu() - truth.gradients[name]).norm() / truth.gradients[name].norm()
        assert error < 5e-3


@pytest.mark.phantom(devices=2)
def test_launches_on_the_tensors_device(problem: Any) -> None:
    """Liger #401; triton #5205, #2441."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = on_gpu(problem, "cuda:0"), on_gpu(problem, "cuda:1")
    with torch.cuda.device(0):
        for inputs in (first, second):
            step(*inputs)
    assert torch.equal(first[0].grad.cpu(), second[0].grad.cpu())
