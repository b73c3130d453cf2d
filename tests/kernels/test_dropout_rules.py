"""`dropout`: what needs no kernel: mistakes, fake tensors, torch's rules for operators, and the cost."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import dropout
from memwall.triton_kernels._dropout_ops import dropout_op
from memwall.triton_kernels.dropout import DropoutShape, cost

H200 = hardware_named("h200")


def test_gradients_by_finite_differences() -> None:
    x, residual = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *ts: dropout(ts[0], 0.4, residual=ts[1], seed=6), (x, residual))
    assert torch.autograd.gradgradcheck(lambda t: dropout(t, 0.4, seed=6), x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    dropout(x, 0.5, residual=x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("seed", [None, 5])
def test_runs_on_fake_tensors_of_a_real_shape(seed: int | None) -> None:
    with FakeTensorMode():
        x, residual = (torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        dropout(x, 0.1, residual=residual, seed=seed).sum().backward()
    for leaf in (x, residual):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


def test_operators_follow_torchs_rules() -> None:
    x, residual = (torch.randn(6, 5).t().requires_grad_() for _ in range(2))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for added in (None, residual):
        torch.library.opcheck(dropout_op, (x, added, torch.tensor(3), 0.4, 1, torch.float32), test_utils=tests)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    def step(x: Tensor, seed: Tensor) -> Tensor:
        return dropout(x * 2.0, 0.3, residual=x, seed=seed)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (33, 20):
        x, seed = torch.randn(rows, 40, requires_grad=True), torch.tensor(rows)
        found, expected = (torch.autograd.grad(run(x, seed).pow(2).sum(), x)[0] for run in (step, compiled))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.5}, r"between 0 and 1, not 1\.5"),
        ({"p": float("nan")}, r"between 0 and 1, not nan"),
        ({"site": -1}, r"sites 0 to 2\^32 - 1 apart, not -1"),
        ({"seed": -1}, r"from 0 to 2\^63 - 1, not -1"),
        ({"seed": torch.zeros(2, dtype=torch.long)}, r"one int64 on cpu, found torch\.int64 \[2\] on cpu"),
        ({"seed": torch.zeros(())}, r"one int64 on cpu, found torch\.float32"),
        ({"residual": torch.zeros(5)}, r"residual \[6\] on cpu, found \[5\]"),
        ({"x": torch.zeros(6, dtype=torch.long)}, r"floating dtypes.*found torch\.int64"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dropout(**{"x": torch.zeros(6), **change})


def test_what_is_not_kept_is_a_mask_of_a_byte_for_each_element() -> None:
    """32 MiB less for each place of Llama 3 8B at 8,192 tokens; three tensors forward, two backward."""
    size = 8192 * 4096
    found = cost(DropoutShape(num_elements=size, adds_residual=True), torch.bfloat16, H200)
    assert found.bytes_moved == 5 * 2 * size
    assert found.saved_bytes == 8
    assert found.eager is not None
    assert found.eager.saved_bytes == 32 << 20
    assert found.seconds < found.eager.seconds
    with pytest.raises(UsageError, match="must not be negative"):
        cost(DropoutShape(num_elements=-1), torch.bfloat16, H200)
