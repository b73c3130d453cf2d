"""DeepSpeed's kernel under torch's optimizers: the bits of DeepSpeed's own optimizer, and torch's state dict."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from late_streams import LateDevice, install
from optimizer_runs import Net, in_groups, same, train, train_step
from torch import Tensor

from memwall.apply.optimizer_state import cpu_speed, cpu_step_checks, deepspeed_adam
from memwall.apply.optimizer_state.cpu_step import CpuStep
from memwall.apply.optimizer_state.deepspeed_adam import DeepSpeedAdam, load_operator
from memwall.errors import ApplyError

KIB = 1 << 10
CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), True),
    "adam": (partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1), False),
}
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    made = LateDevice(computes_late=False)
    install(made, monkeypatch)
    return made


def stepped(optimizer: torch.optim.Optimizer) -> CpuStep:
    return CpuStep(optimizer, CPU, bucket_bytes=20 * KIB, limit_bytes=1 << 30, with_deepspeed=True)


class Another:
    """An operator of a version that is called in another way."""

    def create_adam(self, *_: Any) -> None:
        """As it was."""

    def destroy_adam(self, _: int) -> None:
        """As it was."""

    def adam_update(self, tensors: list[Tensor]) -> None:
        """Not as it was."""


@pytest.mark.parametrize("operator", [Another(), object()])
def test_an_operator_that_is_called_in_another_way_is_none(operator: Any) -> None:
    assert not deepspeed_adam._takes_a_step(operator)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_twenty_steps_are_bitwise_those_of_deepspeeds_own_optimizer(name: str, device: LateDevice) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make, is_decoupled = OPTIMIZERS[name]
    own = partial(DeepSpeedCPUAdam, lr=1e-2, weight_decay=0.1, adamw_mode=is_decoupled)
    plain, plain_state = train(own, num_steps=20)
    model, state = train(make, stepped, num_steps=20)
    assert same(dict(plain.named_parameters()), dict(model.named_parameters()))
    for number, found in state["state"].items():
        expected = plain_state["state"][number]
        assert found["step"] == expected["step"]
        assert all(torch.equal(found[key], expected[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_run_goes_on_with_torchs_kernel_from_what_deepspeeds_has_left(name: str, device: LateDevice) -> None:
    make, _ = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    step = stepped(optimizer)
    for number in range(2):
        train_step(model, optimizer, number)
    other = copy.deepcopy(model)
    resumed = make(in_groups(other), fused=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in resumed.param_groups:
        group["fused"] = True  # a loaded dictionary says how it was stepped before
    step.step_with(deepspeed=False)
    for one, its in ((model, optimizer), (other, resumed)):
        train_step(one, its, 2)
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert same(optimizer.state_dict()["state"], resumed.state_dict()["state"])
    step.undo()


@pytest.mark.deepspeed
def test_scaled_and_negated_gradients_step_as_plain_ones_and_a_step_that_a_scaler_skips_changes_nothing() -> None:
    operator = load_operator()
    assert operator is not None

    def one_step(factor: float, found_inf: float | None = None, **way: Any) -> tuple[Tensor, Any]:
        # Laid in another order, as a transposed weight is.
        parameter = torch.arange(24.0).reshape(4, 6).t().clone(memory_format=torch.preserve_format)
        parameter.grad = factor * (parameter - 11.0)
        optimizer: Any = torch.optim.AdamW([parameter], **way)
        if found_inf is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(256.0), torch.tensor(found_inf)
        DeepSpeedAdam(operator).step(optimizer)
        return parameter, optimizer.state_dict()["state"]

    plain = one_step(1.0)
    assert same(plain, one_step(256.0, found_inf=0.0))  # a power of two: the quotient is exact
    assert same(plain, one_step(-1.0, maximize=True))
    unchanged, state = one_step(256.0, found_inf=1.0)
    assert torch.equal(unchanged, torch.arange(24.0).reshape(4, 6).t())
    assert not state


def test_where_it_is_not_built_a_plan_with_it_is_refused(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_step_checks, "load_operator", lambda: None)
    with pytest.raises(ApplyError, match="DeepSpeed's kernel, which is not built here; install deepspeed and build"):
        stepped(torch.optim.AdamW([torch.zeros(4)]))


def test_amsgrad_is_refused(device: LateDevice) -> None:
    with pytest.raises(ApplyError, match="DeepSpeed's kernel, which has no amsgrad; pass amsgrad=False"):
        stepped(torch.optim.AdamW([torch.zeros(4)], amsgrad=True))


@pytest.mark.deepspeed
def test_both_kernels_are_measured_and_the_other_one_counts_when_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_speed, "_NUM_ELEMENTS", 1 << 12)
    monkeypatch.setattr(cpu_speed, "_LEAST_GAIN", 0.0)
    speeds: Any = cpu_speed.cpu_step_speeds()
    assert min(speeds) > 0
    monkeypatch.setattr(cpu_speed, "_LEAST_GAIN", float("inf"))
    assert cpu_speed.cpu_step_speeds().deepspeed_bytes_per_second == 0.0
