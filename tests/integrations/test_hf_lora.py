"""LoRA adapters of a configuration's model: as many, as large and as costly as those that PEFT makes."""

from collections import Counter
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from hf_configurations import LLAMA, LLAMA_3_8B

from memwall.errors import UsageError
from memwall.integrations.hugging_face.hf_lora import Lora, parse_lora
from memwall.integrations.hugging_face.hf_spec import hugging_face_workload
from memwall.predict.curve import live_peak_bytes

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=16", Lora(rank=16)),
        ("r=16,targets=all-linear", Lora(rank=16)),
        ("r=4, targets=q_proj,v_proj, dropout=0.05", Lora(rank=4, targets=("q_proj", "v_proj"), dropout=0.05)),
        ("targets=q_proj,r=4", Lora(rank=4, targets=("q_proj",))),
        ("r=16,base=nf4", Lora(rank=16, is_packed=True)),
    ],
)
def test_adapters_are_asked_for_by_rank_targets_and_dropout(text: str, expected: Lora) -> None:
    assert parse_lora(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16", "'16' is not understood; expected r=N"),
        ("r=16,rank=4", "'rank' is not understood"),
        ("r=16,r=4", "'r' is not understood"),
        ("r=16,targets=", "'targets' is not understood"),
        ("targets=q_proj,v_proj", "expected r=N"),
        ("r=many", "expected r=N"),
        ("r=0", "r is 0, expected 1 to 65536"),
        ("r=4,base=int8", "base=int8 is not known; expected nf4"),
        ("r=4,base=nf4,nf4", "base=nf4,nf4 is not known; expected nf4"),
        ("r=4,dropout=1", "dropout is 1, expected 0 to below 1"),
    ],
)
def test_what_asks_for_no_adapters_is_refused_with_what_is_expected(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_lora(text)


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_only_adapters_have_gradients_and_optimizer_state(written: Any) -> None:
    spec = written({**LLAMA, "torch_dtype": "bfloat16"})
    base = sum(p.nbytes for p in hugging_face_workload(spec).make_model().parameters())
    workload = hugging_face_workload(spec, batch=2, sequence=16, lora="r=4,targets=q_proj,v_proj", optimizer="adamw")
    trained = [p for p in workload.make_model().parameters() if p.requires_grad]
    # Two layers: q_proj is 32 x 32, v_proj 32 x 16 of two heads in place of four.
    assert sum(p.numel() for p in trained) == 2 * (4 * (32 + 32) + 4 * (32 + 16))
    steady = record_fake(workload, has_cpu_workspaces=True).steps[1]
    held = Counter[str]()
    for storage in steady.storages:
        held[storage.category] += storage.nbytes
    adapters = sum(p.nbytes for p in trained)
    assert {p.dtype for p in trained} == {torch.float32}
    assert held["parameter"] == base + adapters
    assert held["gradient"] == adapters
    assert 2 * adapters <= held["optimizer_state"] < 2 * adapters + 1024  # two moments, and a count for each


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_without_targets_every_linear_layer_but_the_output_gets_an_adapter(written: Any) -> None:
    with torch.device("meta"):
        model = hugging_face_workload(written(LLAMA_3_8B), dtype="bf16", lora="r=16").make_model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention, feed_forward = 2 * (4096 + 4096) + 2 * (4096 + 1024), 3 * (4096 + 14336)
    assert trained == 32 * 16 * (attention + feed_forward) == 41_943_040


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_a_target_that_names_no_layer_is_refused_with_those_that_there_are(written: Any) -> None:
    workload = hugging_face_workload(written(LLAMA), lora="r=4,targets=query")
    with pytest.raises(
        UsageError, match=r"targets=query: no linear layer has that name; there are down_proj, gate_proj"
    ):
        workload.make_model()


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_a_classifier_that_peft_would_train_is_refused(kind: str, written: Any) -> None:
    spec = written({**LLAMA, "architectures": [f"LlamaFor{kind}Classification"]})
    assert hugging_face_workload(spec) is not None
    with pytest.raises(UsageError, match=f"--lora for {kind.lower()} classification: there PEFT trains the classifier"):
        hugging_face_workload(spec, lora="r=4")


@pytest.mark.slow
@pytest.mark.requires("transformers", "peft")
@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (LLAMA, "r=4"),
        (LLAMA, "r=4,targets=q_proj,v_proj,dropout=0.1"),
        ({**LLAMA, "torch_dtype": "bfloat16"}, "r=8,targets=self_attn.q_proj,down_proj"),
        (GPT2, "r=4,targets=c_attn"),
    ],
)
def test_adapters_are_those_of_peft_and_so_is_their_step(config: dict[str, Any], lora: str, written: Any) -> None:
    from peft import LoraConfig, get_peft_model

    spec, asked = written(config), parse_lora(lora)
    ours = hugging_face_workload(spec, batch=2, sequence=16, lora=lora)
    plain = hugging_face_workload(spec, batch=2, sequence=16)

    def with_peft() -> Any:
        targets = list(asked.targets) or "all-linear"
        adapters = LoraConfig(r=asked.rank, target_modules=targets, lora_dropout=asked.dropout)
        return get_peft_model(plain.make_model(), adapters).train()

    theirs = type(plain)(model=with_peft, batch=plain.batch, loss=plain.loss, optimizer=plain.optimizer)
    models = ours.make_model(), theirs.make_model()
    shapes = [sorted((tuple(p.shape), str(p.dtype), p.requires_grad) for p in model.parameters()) for model in models]
    assert shapes[0] == shapes[1]
    peaks = [live_peak_bytes(record_fake(each, has_cpu_workspaces=True).steps[1], "cpu") for each in (ours, theirs)]
    assert peaks[0] == peaks[1]


def _packed_bytes(model: Any) -> int:
    """Returns the bytes of what the packed layers hold, without their biases."""
    return sum(
        tensor.nbytes
        for layer in model.modules()
        if hasattr(layer, "nested_absmax")
        for tensor in (layer.weight, *layer.buffers())
    )


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("layers", "hidden", "inner", "heads", "expected"),
    [(32, 4096, 11008, 32, 3_341_015_936), (80, 8192, 22016, 64, 33_408_324_800)],
    ids=["7B", "65B"],
)
def test_a_llama_in_4_bits_has_the_bytes_of_the_papers_format(
    layers: int, hidden: int, inner: int, heads: int, expected: int, written: Any
) -> None:
    """A weight takes 4 bits and 0.127 more: 8 of each block of 64, 32 of each 256 blocks; a layer 1,092 B of tables."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers} | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32000,
    }
    with torch.device("meta"):
        model = hugging_face_workload(written({**LLAMA, **sizes}), dtype="bf16", lora="r=16,base=nf4").make_model()
    weights = layers * (4 * hidden**2 + 3 * hidden * inner)
    blocks = weights // 64
    assert _packed_bytes(model) == weights // 2 + blocks + blocks // 256 * 4 + layers * 7 * 1092 == expected
    kept = [p for name, p in model.named_parameters() if not p.requires_grad and p.dtype == torch.bfloat16]
    assert sum(p.numel() for p in kept) == 2 * 32000 * hidden + (2 * layers + 1) * hidden


# Weights that end within a block of 64 or of 256 blocks, and biases.
ODD = {**LLAMA, "hidden_size": 40, "intermediate_size": 416, "attention_bias": True}


@pytest.mark.slow
@pytest.mark.requires("transformers", "peft", "bitsandbytes")
@pytest.mark.parametrize(
    ("config", "lora"),
    [
        ({**LLAMA, "torch_dtype": "bfloat16"}, "r=4,base=nf4"),
        (ODD, "r=4,base=nf4,targets=q_proj,v_proj"),
        ({**ODD, "intermediate_size": 2000, "torch_dtype": "bfloat16"}, "r=4,base=nf4"),
        (GPT2, "r=4,base=nf4,targets=c_attn"),
    ],
)
def test_a_base_in_4_bits_is_that_of_bitsandbytes_and_so_is_its_step(
    config: dict[str, Any], lora: str, written: Any
) -> None:
    from peft import LoraConfig, get_peft_model

    spec, asked = written(config), parse_lora(lora)
    ours = hugging_face_workload(spec, batch=2, sequence=16, lora=lora)
    plain = hugging_face_workload(spec, batch=2, sequence=16)

    def with_peft() -> Any:
        targets = list(asked.targets) or "all-linear"
        return get_peft_model(_in_4_bits(plain.make_model()), LoraConfig(r=4, target_modules=targets)).train()

    theirs = type(plain)(model=with_peft, batch=plain.batch, loss=plain.loss, optimizer=plain.optimizer)
    assert _packed_bytes(ours.make_model()) == _bytes_of_bitsandbytes(with_peft())
    steps = [record_fake(each, has_cpu_workspaces=True).steps[1] for each in (ours, theirs)]
    peaks = [live_peak_bytes(step, "cpu") for step in steps]
    num_packed = sum(hasattr(layer, "nested_absmax") for layer in ours.make_model().modules())
    # No operation of theirs reads the table of the 16 values, so that its recording has not seen them.
    assert peaks[0] - peaks[1] == num_packed * 16 * 4


def _in_4_bits(model: Any) -> Any:
    """Returns a model as transformers loads it with a BitsAndBytesConfig, which takes files."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = get_keys_to_not_convert(model)
    for name, layer in list(model.named_modules()):
        if name in kept or not hasattr(layer, "weight") or type(layer).__name__ not in ("Linear", "Conv1D"):
            continue
        num_out, num_in = layer.weight.shape if isinstance(layer, torch.nn.Linear) else layer.weight.shape[::-1]
        # As its constructor makes it, but that no subclass, Params4bit, can be made of a fake tensor.
        new = torch.nn.Linear(num_in, num_out, bias=False)
        new.__class__ = Linear4bit
        vars(new).update(compute_dtype=layer.weight.dtype, compute_type_is_set=True, support_avx512bf16_for_cpu=False)
        data = layer.weight.data if isinstance(layer, torch.nn.Linear) else layer.weight.data.T
        bits, state = quantize_4bit(data.contiguous(), compress_statistics=True, quant_type="nf4")
        new.weight = torch.nn.Parameter(bits, requires_grad=False)
        vars(new.weight).update(quant_state=state, quant_type="nf4", compress_statistics=True)
        new.quant_state, new.bias = state, layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    model.is_loaded_in_4bit = True
    return model


def _bytes_of_bitsandbytes(model: Any) -> int:
    states = [(layer.weight, layer.weight.quant_state) for layer in model.modules() if hasattr(layer, "quant_state")]
    return sum(
        tensor.nbytes
        for weight, state in states
        for tensor in (weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    )
