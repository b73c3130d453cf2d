"""The layers' part of gpu_kernels.py: a stack of transformers' Llama layers, plain or with parts replaced."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from gpu_kernels_cases import Case, Run
from torch import Tensor, nn

from memwall.apply.kernels.patched import patch_kernels

Change = Callable[[nn.Module], None]


def llama(hidden: int, num_layers: int) -> nn.Module:
    """Shaped like Llama 3 8B: heads of 128, a quarter of the keys, an MLP 3.5 times as wide; in bf16."""
    from transformers import LlamaConfig, LlamaModel

    num_heads = max(4, hidden // 128)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 7 * hidden // 2, "vocab_size": 64}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 4}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        return LlamaModel(LlamaConfig(**sizes, **heads, num_hidden_layers=num_layers)).bfloat16()


def _inputs(num_tokens: int, hidden: int, num_layers: int) -> tuple[Tensor, ...]:
    """Hidden states [T, H], then the parameters of all layers."""
    model = llama(hidden, num_layers)
    weights = [
        parameter.detach().requires_grad_() for name, parameter in model.named_parameters() if "embed" not in name
    ]
    return torch.randn(num_tokens, hidden).to(weights[0]).requires_grad_(), *weights


def _through(change: Change) -> Callable[[], Run]:
    """Hidden states after a stack that was changed; every provider computes with the same parameters."""

    def make() -> Run:
        made: dict[tuple[int, int], nn.Module] = {}

        def run(x: Tensor, *weights: Tensor) -> Tensor:
            # Nine parameters a layer, and the last norm's.
            shape = (x.shape[1], len(weights) // 9)
            if shape not in made:
                made[shape] = llama(*shape)
                change(made[shape])
            model = made[shape]
            names = [name for name, _ in model.named_parameters() if "embed" not in name]
            arguments = {"inputs_embeds": x[None], "use_cache": False}
            found = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (), arguments)
            states: Tensor = found.last_hidden_state[0]
            return states

        return run

    return make


def _by_memwall(model: nn.Module) -> None:
    patched = patch_kernels(model)
    if any(not row.is_replaced for row in patched.rows):
        raise RuntimeError(patched.table())


def _by_liger(model: nn.Module) -> None:
    change: Any = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    before = dict(vars(modeling))
    change(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True, model=model)
    # It also replaces the classes, for models that come later.
    vars(modeling).update(before)


def _flops(num_tokens: int, hidden: int, num_layers: int) -> int:
    """Of matmuls and causal attention, forward and backward."""
    weights = 2 * hidden * (hidden + hidden // 4) + 3 * hidden * (7 * hidden // 2)
    return num_layers * 3 * (2 * num_tokens * weights + 2 * num_tokens**2 * hidden)


_eager = _through(lambda model: None)()
LAYER_CASES = {
    "llama_layers": Case(
        shapes=((8192, 4096, 4),),
        make=_inputs,
        eager=_eager,
        providers={
            "memwall": _through(_by_memwall),
            "eager": lambda: _eager,
            "torch.compile": lambda: torch.compile(_eager),
            "liger": _through(_by_liger),
        },
        matmul_flops=_flops,
    )
}
