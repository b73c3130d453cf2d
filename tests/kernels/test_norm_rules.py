"""The norms: what needs no kernel: mistakes, fake tensors, torch's rules for operators, and the cost."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import add_rms_norm, layer_norm, rms_norm
from memwall.triton_kernels.cost import Calibration
from memwall.triton_kernels.norms import NormShape, cost
from memwall.triton_kernels.norms import _ops as ops

H200 = hardware_named("h200")
# A copy bandwidth of 4.3 TB/s.
CALIBRATION = Calibration(copy_efficiency=4.3e12 / H200.memory_bytes_per_second)
MIB = 1 << 20


@pytest.mark.parametrize("casting", ["llama", "gemma", "plain"])
def test_gradients_by_finite_differences(casting: Any) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, casting=casting), (x, w))
    assert torch.autograd.gradcheck(lambda *leaves: add_rms_norm(*leaves, casting=casting), (x, residual, w))
    assert torch.autograd.gradcheck(layer_norm, (x, w, b))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, w, b = torch.randn(shape, requires_grad=True), *torch.randn(2, shape[-1], requires_grad=True)
    y, total = add_rms_norm(x, x, w)
    (y + total + layer_norm(x, w, b) + rms_norm(x, w)).sum().backward()
    assert (y.shape, total.shape) == (shape, shape)
    assert x.grad is not None
    assert x.grad.shape == shape


def test_weights_of_no_rows_get_zeros_as_gradient() -> None:
    w, b = (torch.randn(4, requires_grad=True) for _ in range(2))
    layer_norm(torch.randn(0, 4), w, b).sum().backward()
    assert w.grad is not None
    assert b.grad is not None
    assert not w.grad.any()
    assert not b.grad.any()


def test_gradient_of_the_gradient_is_an_error_not_a_number() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for y in (rms_norm(x), layer_norm(x), add_rms_norm(x, x)[0]):
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="norm_backward"):
            gradient.square().sum().backward()


def test_runs_on_fake_tensors_of_a_real_shape() -> None:
    with FakeTensorMode():
        x, residual = (torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        w, b = (torch.empty(4096, requires_grad=True) for _ in range(2))
        y, total = add_rms_norm(x, residual, w)
        normed = layer_norm(total, w, b)
        (y.sum() + normed.sum()).backward()
    assert (y.dtype, total.dtype, normed.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    for leaf in (x, residual, w, b):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("is_centered", [False, True])
def test_operators_follow_torchs_rules(dtypes: tuple[torch.dtype, torch.dtype], is_centered: bool) -> None:
    x, residual = (torch.randn(6, 5, dtype=dtypes[0]).t().requires_grad_() for _ in range(2))
    w, b = (torch.randn(6, dtype=dtypes[1]).requires_grad_() for _ in range(2))
    terms = (1e-5, "plain", is_centered, dtypes[0])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.norm_op, (x, w, b if is_centered else None, *terms), test_utils=tests)
    torch.library.opcheck(ops.add_norm_op, (x, residual, w, None, *terms, torch.float32), test_utils=tests)
    _, mean, rstd = ops.norm_op(x, w, None, *terms)
    found = (x.detach(), mean.detach(), rstd.detach(), w.detach(), None)
    torch.library.opcheck(ops.norm_apply_op, (*found, *terms), test_utils=tests[:2])


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y, total = add_rms_norm(x, x * 2.0, w)
        return layer_norm(y + total, w, w)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(40, requires_grad=True)
    for rows in (33, 20):
        x = torch.randn(rows, 40, requires_grad=True)
        found, expected = (torch.autograd.grad(run(x, w).square().sum(), (x, w)) for run in (compiled, step))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: rms_norm(x, torch.zeros(3)), r"rms_norm wants weight \[4\] on cpu, found \[3\] on cpu"),
        (lambda x: layer_norm(x, None, torch.zeros(4, device="meta")), r"wants bias \[4\] on cpu, found \[4\] on meta"),
        (lambda x: rms_norm(x.long()), r"floating dtypes.*found torch\.int64"),
        (lambda x: rms_norm(x, out_dtype=torch.int8), r"floating dtypes.*torch\.int8"),
        (lambda x: layer_norm(x.sum()), r"layer_norm wants x \[\.\.\., H\], found a scalar"),
        (lambda x: rms_norm(x, casting="liger"), r"one of llama, gemma, plain, not 'liger'"),
        (lambda x: add_rms_norm(x, x[:1]), r"one shape on one device, found \[2, 4\] on cpu and \[1, 4\] on cpu"),
    ],
)
def test_mistakes_are_named(run: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(torch.zeros(2, 4))


def llama(**change: Any) -> NormShape:
    """A norm of Llama 3 8B at 8,192 tokens."""
    return NormShape(num_rows=8192, num_columns=4096, **change)


def test_bytes_saved_are_those_of_llama_3_8b() -> None:
    """Bytes of a token: eager 8 H, kept 4 H, rebuilt 2 H, and 4 of its statistics."""
    size = 8192 * 4096
    kept, rebuilt = (cost(llama(rebuilds_result=rebuilds), torch.bfloat16, H200) for rebuilds in (False, True))
    assert kept.saved_bytes == 4 * size + 4 * 8192
    assert rebuilt.saved_bytes == 2 * size + 4 * 8192
    assert kept.eager is not None
    assert kept.eager.saved_bytes == 8 * size
    assert kept.seconds < rebuilt.seconds < kept.eager.seconds


@pytest.mark.parametrize(
    ("adds", "forward_and_backward"), [(False, (4 + 6) * 8192 * 4096), (True, (8 + 8) * 8192 * 4096)]
)
def test_bytes_moved_are_those_of_the_tensors(adds: bool, forward_and_backward: int) -> None:
    """4 T H and 6 T H; with the sum 8 T H each. The rest is the buffer where gradients of the weight meet."""
    found = cost(llama(adds_residual=adds, wants_weight_gradient=False), torch.bfloat16, H200).bytes_moved
    assert found == pytest.approx(forward_and_backward, rel=0.001)
    with_weight = cost(llama(adds_residual=adds), torch.bfloat16, H200).bytes_moved
    # 256 chunks of 32 rows: 264 programs would fit, and the last of them would have none. Written and read.
    assert with_weight - found == 2 * 256 * 4096 * 4


def test_rebuilding_the_result_costs_what_its_bytes_take() -> None:
    """31 us for 64 MiB less."""
    kept, rebuilt = (
        cost(llama(rebuilds_result=rebuilds), torch.bfloat16, H200, calibration=CALIBRATION)
        for rebuilds in (False, True)
    )
    assert rebuilt.seconds - kept.seconds == pytest.approx(31e-6, rel=0.02)
    assert kept.saved_bytes - rebuilt.saved_bytes == 64 * MIB


def test_a_row_too_long_to_be_held_is_read_twice() -> None:
    wide, narrow = (
        cost(NormShape(num_rows=4096, num_columns=columns, wants_weight_gradient=False), torch.bfloat16, H200)
        for columns in (16_384, 8192)
    )
    assert wide.bytes_moved == pytest.approx(2 * narrow.bytes_moved * 7 / 5, rel=0.001)


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(UsageError, match="must not be negative"):
        cost(NormShape(num_rows=1, num_columns=-4), torch.bfloat16, H200)
