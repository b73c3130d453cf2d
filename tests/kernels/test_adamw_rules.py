"""`FusedAdamW`: what needs no kernel: mistakes, fake tensors, torch's rules for operators, how often it calls, cost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import FusedAdamW, KernelCost
from memwall.triton_kernels.adamw import AdamWShape, cost
from memwall.triton_kernels.adamw._ops import adamw_op, square_sum_op
from memwall.triton_kernels.adamw._state import new_state
from memwall.triton_kernels.adamw._terms import Scalar
from memwall.triton_kernels.cost import Calibration

H200 = hardware_named("h200")
# A copy bandwidth of 4.3 TB/s.
CALIBRATION = Calibration(copy_efficiency=4.3e12 / H200.memory_bytes_per_second)
LLAMA_3_8B = 8_030_261_248


def param(*shape: int, **how: Any) -> nn.Parameter:
    p = nn.Parameter(torch.ones(*shape, **how))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr must not be negative, found -1\.0"),
        ({"betas": (0.9, 1.0)}, r"betas are two numbers from 0 to below 1, found \(0\.9, 1\.0\)"),
        ({"betas": (torch.tensor(0.9), 0.9)}, r"betas are two numbers"),
        ({"eps": -1e-8}, r"eps must not be negative, found -1e-08"),
        ({"weight_decay": float("nan")}, r"weight_decay must not be negative, found nan"),
        ({"moment_bits": 4}, r"moment_bits is 8 or 32, not 4"),
        ({"seed": -1}, r"seed must be from 0 to below 2\^63, found -1"),
        ({"max_norm": 0.0}, r"max_norm must be above 0, found 0\.0; None does not clip"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FusedAdamW([param(3)], **options)
    if "max_norm" not in options:
        with pytest.raises(UsageError, match=message):
            FusedAdamW([{"params": [param(3)], **options}])


def sparse() -> Tensor:
    p = param(3, 4)
    p.grad = torch.eye(3, 4).to_sparse()
    return p


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sparse, r"whole dense tensors, found a gradient of layout torch\.sparse_coo"),
        (lambda: param(3, dtype=torch.complex64), r"floating dtypes of 16 to 64 bits, found torch\.complex64"),
        (
            lambda: _with_gradient(nn.Parameter(torch.ones(4, 6)[:, ::2])),
            r"without gaps or overlaps in memory, found one of shape \[4, 3\] with strides \[6, 2\]",
        ),
        (
            lambda: _with_gradient(nn.Parameter(torch.ones(4, 1).expand(4, 3))),
            r"without gaps or overlaps in memory, found one of shape \[4, 3\] with strides \[1, 0\]",
        ),
    ],
    ids=["sparse", "complex", "gaps", "overlap"],
)
def test_tensors_that_are_not_supported_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FusedAdamW([make()]).step()


def _with_gradient(p: nn.Parameter) -> nn.Parameter:
    p.grad = torch.ones(p.shape)
    return p


def test_parameters_on_two_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="all parameters on one device, found cpu, meta"):
        FusedAdamW([param(3), param(3, device="meta")]).step()


def test_a_step_that_is_refused_changes_nothing() -> None:
    first, gaps = param(64, 64), _with_gradient(nn.Parameter(torch.ones(4, 6)[:, ::2]))
    optimizer = FusedAdamW([{"params": [first]}, {"params": [gaps]}])
    with pytest.raises(UsageError, match="without gaps"):
        optimizer.step()
    assert (first == 1.0).all()


def test_a_parameter_that_was_laid_out_anew_is_refused() -> None:
    p = param(2, 3, 4, 4)
    optimizer = FusedAdamW([p])
    optimizer.step()
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    with pytest.raises(
        UsageError, match=r"strides \[48, 1, 12, 3\] on cpu, its moments have .* \[48, 16, 4, 1\] on cpu"
    ):
        optimizer.step()


def test_state_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    params = [param(64, 64), param(3)]
    optimizer = FusedAdamW(params, lr=0.5)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[params[0]].items()}
    others = [param(64, 64), param(4)]
    other = FusedAdamW(others, lr=0.25)
    other.step()
    other.step()
    with pytest.raises(UsageError, match=r"must be \[3\] torch\.float32, found \[4\] torch\.float32"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[params[0]].items())


def test_amsgrad_is_refused() -> None:
    p = param(3)
    other = torch.optim.AdamW([p], amsgrad=True)
    other.step()
    with pytest.raises(UsageError, match=r"no amsgrad; take torch\.optim\.AdamW\(amsgrad=True, fused=True\)"):
        FusedAdamW([p]).load_state_dict(other.state_dict())


def saved(options: dict[str, Any], shape: tuple[int, ...] = (64, 64)) -> dict[str, Any]:
    p = param(*shape)
    optimizer = FusedAdamW([p], **options)
    optimizer.step()
    return optimizer.state_dict()


def test_state_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="the state has moments of 8 bits, this optimizer was made for 32"):
        FusedAdamW([param(64, 64)]).load_state_dict(saved({"moment_bits": 8}))
    with pytest.raises(UsageError, match=r"\[64, 64\] torch\.float32, found \[32, 128\] torch\.float32"):
        FusedAdamW([param(64, 64)]).load_state_dict(saved({}, (32, 128)))
    plain = torch.optim.AdamW([param(64, 64)])
    plain.step()
    with pytest.raises(UsageError, match="exp_avg_unit, exp_avg_sq_unit with moments of 8 bits, found step, exp_avg"):
        FusedAdamW([param(64, 64)], moment_bits=8).load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        FusedAdamW([{"params": [param(2)]}, {"params": [param(2)]}]).load_state_dict(saved({}))


def test_quantised_state_of_another_memory_format_is_refused() -> None:
    state = saved({"moment_bits": 8}, (2, 16, 16, 16))
    p = nn.Parameter(torch.ones(2, 16, 16, 16).contiguous(memory_format=torch.channels_last))
    with pytest.raises(UsageError, match="load into the memory format in which they were saved"):
        FusedAdamW([p], moment_bits=8).load_state_dict(state)


def test_fp32_state_of_another_memory_format_is_laid_out_anew() -> None:
    state = saved({}, (2, 3, 4, 4))
    state["state"][0]["exp_avg"] = torch.arange(96.0).view(2, 3, 4, 4)
    p = nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    optimizer = FusedAdamW([p])
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[p]["exp_avg"], state["state"][0]["exp_avg"])
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()


class Calls(TorchDispatchMode):
    """Counts operators, except those that read a shape or make a tensor without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"moment_bits": 8, "max_norm": 1.0}], ids=["plain", "8-bit-clipped"])
def test_calls_do_not_grow_with_the_number_of_tensors(options: dict[str, Any]) -> None:
    """And none of them brings a number to the host."""
    counts = []
    for num_tensors in (2, 40):
        params = [param(64, 64) for _ in range(num_tensors)]
        optimizer = FusedAdamW(params, **options)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        counts.append([name for name in calls.names if not name.startswith("aten.detach")])
    inside = [name for name in counts[0] if name.startswith("memwall.")]
    assert inside == ["memwall.square_sum.default"] * ("max_norm" in options) + ["memwall.adamw.default"]
    assert counts[0] == counts[1]
    assert not any("_local_scalar_dense" in name or "item" in name for name in counts[0])


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        params = [param(4096, 4096, dtype=torch.bfloat16), param(4096)]
        optimizer = FusedAdamW(params, moment_bits=8, stochastic_rounding=True, max_norm=1.0)
        optimizer.step()
        state = optimizer.state[params[0]]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (4096, 4096)),
        "exp_avg_sq": (torch.uint8, (4096, 4096)),
        "exp_avg_unit": (torch.float32, (65_536,)),
        "exp_avg_sq_unit": (torch.float32, (65_536,)),
    }
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("bits", [8, 32])
def test_operators_follow_torchs_rules(bits: Any) -> None:
    params = [torch.randn(64, 64), torch.randn(70, 60)]
    grads = [torch.randn_like(p) for p in params]
    states = [new_state(p, bits) for p in params]
    names = ("exp_avg", "exp_avg_sq", "exp_avg_unit", "exp_avg_sq_unit")
    moments = [[state[name] for state in states if name in state] for name in names]
    scalars = torch.ones(2, len(Scalar), dtype=torch.float64)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(adamw_op, (params, grads, *moments, scalars, [0, 1], None), test_utils=tests)
    torch.library.opcheck(square_sum_op, (grads,), test_utils=tests)


def llama(dtype: torch.dtype = torch.bfloat16, **change: Any) -> KernelCost:
    shape = AdamWShape(num_elements=LLAMA_3_8B, **change)
    return cost(shape, dtype, H200, calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("dtype", "change", "moved", "milliseconds"),
    [
        (torch.float32, {}, 28.0, 52.3),
        (torch.bfloat16, {"moment_bits": 8}, 10.06, 18.8),
        (torch.bfloat16, {}, 22.0, 41.1),
        (torch.bfloat16, {"moment_bits": 8, "clips": True}, 12.06, 22.5),
    ],
    ids=["fp32", "8-bit", "bf16-with-fp32-moments", "8-bit-clipped"],
)
def test_bytes_of_a_parameter(dtype: torch.dtype, change: dict[str, Any], moved: float, milliseconds: float) -> None:
    """Gradient, parameter twice, both moments twice; what clipping adds is one more pass over the gradients."""
    found = llama(dtype, **change)
    assert found.bytes_moved / LLAMA_3_8B == pytest.approx(moved, abs=0.005)
    assert found.seconds * 1e3 == pytest.approx(milliseconds, abs=0.1)


def test_moments_are_what_a_step_keeps() -> None:
    assert llama(moment_bits=8).saved_bytes / LLAMA_3_8B == pytest.approx(2.03, abs=0.002)
    assert llama().saved_bytes == 8 * LLAMA_3_8B
    params = [torch.ones(64, 64), torch.ones(17, 241)]
    kept = sum(value.nbytes for p in params for name, value in new_state(p, 8).items() if name != "step")
    forecast = sum(
        cost(AdamWShape(num_elements=p.numel(), moment_bits=8), torch.float32, H200).saved_bytes for p in params
    )
    assert kept == forecast


def test_is_cheaper_than_eager() -> None:
    for change in ({}, {"clips": True}):
        found = llama(**change)
        assert found.eager is not None
        assert found.seconds < found.eager.seconds
        assert found.transient_bytes < found.eager.transient_bytes / 1000


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(UsageError, match="must not be negative"):
        cost(AdamWShape(num_elements=-1), torch.bfloat16, H200)
