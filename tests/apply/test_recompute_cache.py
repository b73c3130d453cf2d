"""Recomputed blocks that fill a key-value cache: it is not extended twice, and nothing else runs than was recorded."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.errors import ApplyError
from memwall.planning.menu import Menu
from memwall.planning.techniques.recompute import Recompute

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.requires("transformers")]

Recomputed = Callable[..., AbstractContextManager[None]]
AfterAStep = Callable[[nn.Module, Callable[[], Tensor]], dict[str, Tensor]]
AssertSameBits = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
MenusOf = Callable[[nn.Module, Callable[[], Tensor]], tuple[Menu, ...]]


def causal_language_model(name: str) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """A small model that fills a cache when it trains, as models of transformers do unless told otherwise."""
    torch.manual_seed(0)
    if name == "gpt2":  # hands its cache on by position
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=16)
        model: nn.Module = GPT2LMHeadModel(config)
        blocks = [f"transformer.h.{number}" for number in range(3)]
    else:  # by name
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        blocks = [f"model.layers.{number}" for number in range(3)]
    assert config.use_cache
    text = torch.randint(64, (2, 8))
    return model.train(), {"input_ids": text, "labels": text}, blocks


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("which", [(0, 1, 2), (1,), (0, 2), (2,)])
def test_a_cache_is_not_extended_twice_whichever_blocks_are_recomputed(
    name: str,
    which: tuple[int, ...],
    recomputed: Recomputed,
    after_a_step: AfterAStep,
    assert_same_bits: AssertSameBits,
) -> None:
    model, batch, blocks = causal_language_model(name)
    expected = after_a_step(model, lambda: model(**batch).loss)
    with recomputed(model, *(Recompute(block=blocks[number]) for number in which)):
        assert_same_bits(after_a_step(model, lambda: model(**batch).loss), expected)
        cache = model(**batch).past_key_values
    lengths = [cache.get_seq_length(layer) for layer in range(3)]
    assert lengths == [0 if number in which else 8 for number in range(3)]


def test_the_operations_are_those_that_were_recorded_with_the_cache(recomputed: Recomputed, menus_of: MenusOf) -> None:
    """So that the numbers of kept operations mean the same in the trace and in the run."""
    model, batch, blocks = causal_language_model("llama")
    menus = menus_of(model, lambda: model(**batch).loss)
    seen: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    menu = next(menu for menu in menus if menu.block.path == blocks[1])
    block = model.model.layers[1]
    block.register_forward_pre_hook(lambda *_: seen.clear())
    names: list[list[str]] = []
    block.register_forward_hook(lambda *_: names.append(list(seen)))
    with recomputed(model, Recompute(block=blocks[1])), Listening():
        model(**batch)  # the first call is proven by a second run
        model(**batch)
    ran = [name for name in names[1] if name != "aten.detach.default"]
    while ran[0] == "aten.empty.memory_format":  # checkpoint's own, in torch 2.11
        del ran[0]
    assert tuple(ran) == menu.op_names


def test_a_cache_that_holds_a_past_is_refused(recomputed: Recomputed) -> None:
    model, batch, blocks = causal_language_model("llama")
    past = model(input_ids=batch["input_ids"]).past_key_values
    with recomputed(model, Recompute(block=blocks[1])), pytest.raises(ApplyError) as error:
        model(input_ids=batch["input_ids"], past_key_values=past)
    assert str(error.value) == (
        "a block to be recomputed was called with a key-value cache that already holds 8 positions for it, as "
        "generation does; call the model without past_key_values when training"
    )
