"""What a layer saves, and what each lever costs: the table that tells a planner to rebuild before it recomputes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memwall.apply.kernels.patched import patch_kernels
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import recompute_handles
from memwall.triton_kernels.cost import Calibration, KernelCost
from memwall.triton_kernels.glu import GluShape
from memwall.triton_kernels.glu import cost as glu_cost
from memwall.triton_kernels.linear_cross_entropy import LossShape
from memwall.triton_kernels.linear_cross_entropy import cost as loss_cost
from memwall.triton_kernels.norms import NormShape
from memwall.triton_kernels.norms import cost as norm_cost
from memwall.triton_kernels.pack import PackShape
from memwall.triton_kernels.pack import cost as pack_cost

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


def test_packing_what_is_left_of_the_activation_costs_more_and_recomputing_the_layer_most() -> None:
    """Per GiB: 1.5 ms for gate and up in 8 bits, 5.7 ms for a checkpoint of the layer, against 0.75 and 0.50 above."""
    kept = norm(rebuilds_result=True), mlp(rebuilds_product=True)
    pair = PackShape(num_elements=2 * TOKENS * WIDTH)
    packed = pack_cost(pair, torch.bfloat16, H200, calibration=CALIBRATION)
    freed_gib = (kept[1].saved_bytes - packed.saved_bytes) / GIB
    assert layer_gib(*kept) - freed_gib == pytest.approx(0.500, abs=0.01)
    assert packed.seconds * 1e3 / freed_gib == pytest.approx(1.5, abs=0.1)
    # The layer's matmuls and causal attention at 790 TFLOP/s; norms and activation are the rebuilds' passes.
    weights = 2 * HIDDEN * (HIDDEN + KEYS) + 3 * HIDDEN * WIDTH
    forward = (2 * TOKENS * weights + 2 * TOKENS**2 * HIDDEN) / 790e12
    forward += 2 * (kept[0].seconds - norm().seconds) + kept[1].seconds - mlp().seconds
    input_gib = 2 * TOKENS * HIDDEN / GIB
    assert input_gib == pytest.approx(0.062, abs=0.001)
    assert forward * 1e3 / (layer_gib(norm(), mlp()) - input_gib) == pytest.approx(5.7, rel=0.05)


def test_the_chunk_is_a_lever_of_its_own() -> None:
    """Slab of Llama 3's logits: 1,002 MiB at 4,096 rows, 250 MiB at 1,024; no reading of the head comes for free."""

    def cost(chunk_rows: int) -> KernelCost:
        shape = LossShape(
            num_rows=TOKENS,
            hidden_size=HIDDEN,
            vocabulary_size=128_256,
            chunk_rows=chunk_rows,
            wants_weight_gradient=False,
        )
        return loss_cost(shape, torch.bfloat16, H200, calibration=CALIBRATION)

    wide, narrow = cost(4096), cost(1024)
    assert (wide.transient_bytes - narrow.transient_bytes) / 2**20 == pytest.approx(1002 - 250.5, abs=1)
    assert narrow.bytes_moved > wide.bytes_moved


def test_over_all_layers_of_llama_3_8b() -> None:
    """GiB: 49 in eager code, 34 fused, 23 with results rebuilt, for 7.2 ms a step."""
    rebuilt = norm(rebuilds_result=True), mlp(rebuilds_product=True)
    found = [32 * layer_gib(*each) for each in ((eager(norm()), eager(mlp())), (norm(), mlp()), rebuilt)]
    assert found == pytest.approx([49.0, 34.0, 23.0], abs=0.05)
    extra = 2 * (rebuilt[0].seconds - norm().seconds) + rebuilt[1].seconds - mlp().seconds
    assert 32 * extra * 1e3 == pytest.approx(7.2, abs=0.05)
    # What the fused libraries that rebuild nothing keep is the state in the middle.
    assert found[2] < 0.75 * found[1]


class Held:
    """Hooks that count what autograd keeps, each storage once, parameters not."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept: dict[int, Tensor] = {}
        self._parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in self._parameters:
            self._kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("state", ["eager", "fused", "rebuilt"])
def test_the_formula_of_a_layer_is_what_hooks_count_in_a_real_one(state: str) -> None:
    """Of one more layer of transformers' Llama: 20 H + 4 kv + 8 I bytes a token in eager code."""
    from transformers import LlamaConfig, LlamaModel

    tokens, hidden, keys, width, num_heads = 64, 256, 64, 896, 8

    def held_bytes(num_layers: int) -> int:
        sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": num_layers}
        heads = {"num_attention_heads": num_heads, "num_key_value_heads": 2, "vocab_size": 64}
        model = LlamaModel(LlamaConfig(**sizes, **heads)).bfloat16()
        if state != "eager":
            assert patch_kernels(model).num_replaced == 3 * num_layers + 1
        held = Held(model)
        with recompute_handles(held) if state == "rebuilt" else saved_tensors_hooks(held.pack, held.unpack):
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return held.num_bytes

    rebuilds = state == "rebuilt"
    of_norm = norm_cost(NormShape(num_rows=tokens, num_columns=hidden, rebuilds_result=rebuilds), torch.bfloat16, H200)
    of_mlp = glu_cost(GluShape(num_rows=tokens, num_columns=width, rebuilds_product=rebuilds), torch.bfloat16, H200)
    if state == "eager":
        of_norm, of_mlp = eager(of_norm), eager(of_mlp)
    expected = 2 * of_norm.saved_bytes + of_mlp.saved_bytes + tokens * (4 * hidden + 4 * keys)
    if state == "eager":
        assert expected == tokens * (20 * hidden + 4 * keys + 8 * width)
    # Attention's own log-sum-exp is 4 bytes a head.
    assert held_bytes(3) - held_bytes(2) == pytest.approx(expected + 4 * tokens * num_heads, rel=0.001)
