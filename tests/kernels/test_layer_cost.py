"""What a layer saves, and what each lever costs: the table that tells a planner to rebuild before it recomputes."""

import pytest
import torch

from memwall.predict.hardware import hardware_named
from memwall.triton_kernels.cost import Calibration, KernelCost
from memwall.triton_kernels.glu import GluShape
from memwall.triton_kernels.glu import cost as glu_cost
from memwall.triton_kernels.norms import NormShape
from memwall.triton_kernels.norms import cost as norm_cost

TOKENS, HIDDEN, WIDTH, KEYS = 8192, 4096, 14_336, 1024
GIB = 1 << 30
H200 = hardware_named("h200")
# A copy that was seen to reach 4.3 TB/s.
CALIBRATION = Calibration(copy_efficiency=4.3e12 / H200.memory_bytes_per_second)
# Queries, keys, values and the attention's result: what no kernel here changes.
ATTENTION_BYTES = TOKENS * (4 * HIDDEN + 4 * KEYS)


def norm(**change: bool) -> KernelCost:
    shape = NormShape(num_rows=TOKENS, num_columns=HIDDEN, **change)  # type: ignore[arg-type]
    return norm_cost(shape, torch.bfloat16, H200, calibration=CALIBRATION)


def mlp(**change: bool) -> KernelCost:
    shape = GluShape(num_rows=TOKENS, num_columns=WIDTH, **change)
    return glu_cost(shape, torch.bfloat16, H200, calibration=CALIBRATION)


def layer_gib(norm_cost: KernelCost, mlp_cost: KernelCost) -> float:
    """Two norms, one gated activation, attention; Llama 3 8B at 8,192 tokens in bf16."""
    return (2 * norm_cost.saved_bytes + mlp_cost.saved_bytes + ATTENTION_BYTES) / GIB


def eager(cost: KernelCost) -> KernelCost:
    assert cost.eager is not None
    return cost.eager


@pytest.mark.parametrize(
    ("norms", "activation", "gib"),
    [
        (eager(norm()), eager(mlp()), 1.531),
        (norm(), mlp(), 1.062),
        (norm(), mlp(rebuilds_product=True), 0.844),
        (norm(rebuilds_result=True), mlp(rebuilds_product=True), 0.719),
    ],
    ids=["eager", "fused", "without-the-product", "without-normed-results"],
)
def test_saved_bytes_of_a_layer(norms: KernelCost, activation: KernelCost, gib: float) -> None:
    assert layer_gib(norms, activation) == pytest.approx(gib, abs=0.001)


def test_fused_operations_save_bytes_and_time() -> None:
    for cost in (norm(), mlp()):
        assert cost.saved_bytes < eager(cost).saved_bytes
        assert cost.seconds < eager(cost).seconds


@pytest.mark.parametrize(
    ("kept", "rebuilt", "calls", "milliseconds", "milliseconds_per_gib"),
    [
        (mlp(), mlp(rebuilds_product=True), 1, 0.164, 0.75),
        (norm(), norm(rebuilds_result=True), 2, 0.062, 0.50),
    ],
    ids=["product", "normed"],
)
def test_exchange_rates(
    kept: KernelCost, rebuilt: KernelCost, calls: int, milliseconds: float, milliseconds_per_gib: float
) -> None:
    """A layer's checkpoint costs 5.7 ms for a GiB: rebuilding comes first."""
    extra = calls * (rebuilt.seconds - kept.seconds) * 1e3
    freed_gib = calls * (kept.saved_bytes - rebuilt.saved_bytes) / GIB
    assert extra == pytest.approx(milliseconds, abs=0.001)
    assert extra / freed_gib == pytest.approx(milliseconds_per_gib, abs=0.01)
