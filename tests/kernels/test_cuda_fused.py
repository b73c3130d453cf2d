"""Gated activations and norms on a GPU: what neither the reference nor the interpreter can show."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from phantom_processes import is_phantom
from torch import Tensor

from memwall.triton_kernels import geglu, rms_norm, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.requires("triton")]


# Triton's interpreter takes a program at a time; test_interpreter.py has every width and type.
ROWS = 17 if is_phantom() else 257
WIDTHS = (123, 4097) if is_phantom() else (1, 123, 4096, 4097, 8192, 9001, 65_536)
DTYPES = (torch.float32, torch.bfloat16) if is_phantom() else (torch.float32, torch.float16, torch.bfloat16)


def plain_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * F.rms_norm(x.float() if x.dtype != torch.float64 else x, x.shape[-1:], None, 1e-6).to(x.dtype)


def gemma_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(wide), x.shape[-1:], None, 1e-6) * (1.0 + w.to(wide))).to(x.dtype)


# Ours, plain torch, and how many matrices and vectors it takes.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, int]] = {
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, 2, 0),
    "geglu": (geglu, lambda gate, up: F.gelu(gate) * up, 2, 0),
    "rms_norm": (rms_norm, plain_rms_norm, 1, 1),
    "rms_norm (gemma)": (partial(rms_norm, casting="gemma"), gemma_rms_norm, 1, 1),
}


@pytest.fixture(params=OPERATIONS)
def case(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return OPERATIONS[request.param]


def inputs(case: Any, dtype: torch.dtype, columns: int = 1000, device: str = "cuda") -> list[Tensor]:
    _, _, num_matrices, num_vectors = case
    shapes = [(ROWS, columns)] * num_matrices + [(columns,)] * num_vectors
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def step(run: Callable[..., Any], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*tensors).sum(), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", WIDTHS)
def test_is_as_exact_as_torch(operation: Any, case: Any, dtype: torch.dtype, columns: int) -> None:
    ours, plain, *_ = case
    operation(ours, plain).check(*(tensor.detach() for tensor in inputs(case, dtype, columns)))


@pytest.mark.phantom(numbers=False)
def test_the_host_never_waits(case: Any) -> None:
    tensors = inputs(case, torch.bfloat16)
    step(case[0], tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(case[0], tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(is_phantom(), reason="a graph that is replayed computes nothing on the phantom device")
def test_a_graph_captures_it(case: Any) -> None:
    tensors = inputs(case, torch.bfloat16)
    expected = step(case[0], tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(case[0], tensors)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_runs_are_bitwise_equal(case: Any) -> None:
    tensors = inputs(case, torch.bfloat16, 8192)
    assert all(torch.equal(a, b) for a, b in zip(step(case[0], tensors), step(case[0], tensors), strict=True))


@pytest.mark.phantom(devices=2)
def test_launches_on_the_tensors_device(case: Any) -> None:
    """Liger #401; triton #5205, #2441."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = inputs(case, torch.bfloat16, device="cuda:0")
    moved = [tensor.detach().to("cuda:1").requires_grad_() for tensor in tensors]
    with torch.cuda.device(0):
        for a, b in zip(step(case[0], tensors), step(case[0], moved), strict=True):
            assert torch.equal(a.cpu(), b.cpu())
