"""A layer of a model saves so much for backward: in eager code, and with fused kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memwall.apply.kernels.patched import patch_kernels


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


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize("state", ["eager", "fused"])
def test_the_formula_of_a_layer_is_what_hooks_count_in_a_real_one(state: str) -> None:
    """One more layer of transformers' Llama in bf16: 20 H + 4 kv + 8 I bytes a token in eager code."""
    from transformers import LlamaConfig, LlamaModel

    tokens, hidden, keys, width, num_heads = 64, 256, 64, 896, 8

    def held_bytes(num_layers: int) -> int:
        sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": num_layers}
        heads = {"num_attention_heads": num_heads, "num_key_value_heads": 2, "vocab_size": 64}
        model = LlamaModel(LlamaConfig(**sizes, **heads)).bfloat16()
        if state != "eager":
            assert patch_kernels(model).num_replaced == 3 * num_layers + 1
        held = Held(model)
        with saved_tensors_hooks(held.pack, held.unpack):
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return held.num_bytes

    of_norm = {"eager": 8 * hidden, "fused": 4 * hidden + 4}[state]
    of_mlp = {"eager": 8 * width, "fused": 6 * width}[state]
    # Queries, keys, values and the attention's result; its own log-sum-exp is 4 bytes a head.
    of_attention = 4 * hidden + 4 * keys + 4 * num_heads
    expected = tokens * (2 * of_norm + of_mlp + of_attention)
    assert held_bytes(3) - held_bytes(2) == pytest.approx(expected, rel=0.001)
