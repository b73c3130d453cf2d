"""`rope`: what needs no kernel: mistakes, fake tensors, torch's rules for operators, and the cost."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import rope
from memwall.triton_kernels._rope_ops import rope_op
from memwall.triton_kernels.cost import Calibration
from memwall.triton_kernels.rope import RopeShape, cost

H200 = hardware_named("h200")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_by_finite_differences(interleaved: bool, inplace: bool) -> None:
    x = torch.randn(2, 2, 3, 7, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 3, 2, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return rope(x * 1.0, cos, sin, interleaved=interleaved, inplace=inplace)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
@pytest.mark.parametrize("inplace", [False, True])
def test_empty_tensors(shape: tuple[int, ...], inplace: bool) -> None:
    leaf = torch.randn(shape, requires_grad=True)
    rope(leaf * 1.0, torch.ones(shape[2], 4), torch.ones(shape[2], 4), inplace=inplace).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == shape


@pytest.mark.parametrize("inplace", [False, True])
def test_runs_on_fake_tensors_of_a_real_shape(inplace: bool) -> None:
    with FakeTensorMode():
        leaf = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16, requires_grad=True)
        tables = torch.empty(1, 8192, 64), torch.empty(1, 8192, 64)
        rotated = rope((leaf * 1.0).transpose(1, 2), *tables, inplace=inplace)
        rotated.sum().backward()
    assert (rotated.shape, rotated.dtype) == ((1, 32, 8192, 128), torch.bfloat16)
    assert rotated.stride() == (32 * 8192 * 128, 128, 32 * 128, 1)
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_operators_follow_torchs_rules(interleaved: bool) -> None:
    x, table = torch.randn(2, 3, 4, 8).transpose(1, 2).requires_grad_(), torch.randn(3, 3)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(rope_op, (x, table, table, interleaved, -2, False), test_utils=tests)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    def step(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x * 2.0, cos, sin, inplace=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (33, 20):
        x, table = torch.randn(2, 3, length, 40, requires_grad=True), torch.randn(length, 10)
        found, expected = (torch.autograd.grad(run(x, table, table).pow(2).sum(), x)[0] for run in (step, compiled))
        assert torch.equal(found, expected)


def test_only_the_tables_are_saved() -> None:
    tables = torch.randn(4, 10), torch.randn(4, 10)
    leaf = torch.randn(2, 3, 4, 20, requires_grad=True)
    for inplace in (False, True):
        saved: list[int] = []
        x = leaf * 1.0
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):  # noqa: B023
            rope(x, *tables, inplace=inplace)
        assert sorted(saved) == sorted(table.data_ptr() for table in tables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 2, 2, 4, 8)}, r"2 to 4 dimensions for sequence_dim=-2, found \[2, 2, 2, 4, 8\]"),
        ({"x": torch.zeros(4, 8), "sequence_dim": -3}, r"3 to 4 dimensions for sequence_dim=-3"),
        ({"sequence_dim": 1}, r"dimension -2 or -3, not 1"),
        ({"cos": torch.zeros(4, 5)}, r"wants cos and sin \[4, P\] or \[2, 4, P\].*at most 8.*found \[4, 5\] and"),
        ({"cos": torch.zeros(5, 4)}, r"found \[5, 4\] and \[4, 4\]"),
        ({"cos": torch.zeros(3, 4, 4), "sin": torch.zeros(3, 4, 4)}, r"found \[3, 4, 4\] and \[3, 4, 4\]"),
        ({"x": torch.zeros(2, 3, 4, 8, dtype=torch.long)}, r"floating dtypes.*found torch\.int64"),
        ({"sin": torch.zeros(4, 4, device="meta")}, r"one device, found cpu, cpu, meta"),
        ({"sin": torch.zeros(4, 4, requires_grad=True)}, r"no gradient; detach them"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(2, 3, 4, 8), "cos": torch.zeros(4, 4), "sin": torch.zeros(4, 4), **change}
    with pytest.raises(UsageError, match=message):
        rope(**given)


def test_cost_is_that_of_llama_3_8b() -> None:
    """4 T (H + kv) bytes each way for queries and keys, tables apart: 39 us at 4.3 TB/s; nothing is saved."""
    calibration = Calibration(copy_efficiency=4.3e12 / H200.memory_bytes_per_second)
    found = [
        cost(
            RopeShape(num_tokens=8192, num_heads=heads, head_dim=128, table_bytes=0),
            torch.bfloat16,
            H200,
            calibration=calibration,
        )
        for heads in (32, 8)
    ]
    assert sum(part.bytes_moved for part in found) == 2 * 4 * 8192 * (4096 + 1024)
    assert sum(part.seconds for part in found) / 2 == pytest.approx(39e-6, rel=0.01)
    assert [part.saved_bytes for part in found] == [0, 0]
    assert found[0].eager is not None
    assert found[0].eager.seconds > 5 * found[0].seconds


def test_cost_of_what_is_left_alone() -> None:
    """In place the features that are not rotated are neither read nor written in forward."""
    whole, part = (
        RopeShape(num_tokens=100, num_heads=4, head_dim=64, rotary_dim=16, inplace=inplace) for inplace in (False, True)
    )
    size = 100 * 4 * 64 * 2
    assert cost(whole, torch.bfloat16, H200).bytes_moved == 4 * size + 2 * 100 * 16 * 4
    assert cost(part, torch.bfloat16, H200).bytes_moved == 2.5 * size + 2 * 100 * 16 * 4
    with pytest.raises(UsageError, match="rotary_dim not above head_dim"):
        cost(RopeShape(num_tokens=1, num_heads=1, head_dim=8, rotary_dim=16), torch.bfloat16, H200)
