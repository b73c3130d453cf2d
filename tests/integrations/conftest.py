"""A small Llama that holds much more in activations than in weights, data for it, and digests of what it learned."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

SAMPLES, SEQUENCE = 16, 256


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """Accelerate keeps precision and devices per process; tests want different ones."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def make_model() -> Callable[[], Any]:
    """The model, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )

    def make() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    return make


@pytest.fixture(scope="session")
def samples() -> list[dict[str, Tensor]]:
    """Three batches of 16 samples of 256 tokens."""
    tokens = torch.randint(0, 128, (3 * SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.fixture(scope="session")
def digest() -> Callable[[nn.Module], str]:
    """SHA-256 over all parameters."""

    def of(model: nn.Module) -> str:
        found = hashlib.sha256()
        for parameter in model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()

    return of


@pytest.fixture
def count_calls() -> Callable[[nn.Module], list[None]]:
    """A list that grows by one with each forward of a module, those of a recomputation too."""

    def on(module: nn.Module) -> list[None]:
        calls: list[None] = []
        module.register_forward_pre_hook(lambda *_: calls.append(None))
        return calls

    return on
