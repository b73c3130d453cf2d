"""What is refused as a Hugging Face configuration: one clear error each, and no foreign code."""

import json
from pathlib import Path
from typing import Any

import pytest

from memwall.errors import UsageError
from memwall.integrations.hugging_face.hf_spec import hugging_face_workload, positions_of

pytestmark = pytest.mark.requires("transformers")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "there is no 'model_type'; expected the config.json of a transformers model"),
        (
            {"architectures": ["LamaForCausalLM"]},
            "architecture 'LamaForCausalLM' can't be trained here; model type 'llama' has LlamaForCausalLM (causal), "
            "LlamaForSequenceClassification (sequence classification), LlamaForTokenClassification (token "
            "classification); did you mean LlamaForCausalLM",
        ),
        (
            {"architectures": ["ClipModel"], "model_type": "clip"},
            "architecture 'ClipModel' can't be trained here; model type 'clip' has CLIPForImageClassification (image "
            "classification), CLIPModel (contrastive); did you mean CLIPModel",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}},
            "'auto_map' asks for code that the model brings along, which is never run here; write a memwall.Workload "
            "that builds the model, and give it as path/file.py:factory",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "'quantization_config' asks for quantised weights, which can't be traced yet; remove it to trace the model "
            "unquantised",
        ),
        ({"num_hidden_layers": None}, "there is no 'num_hidden_layers'; transformers would assume 32, so give it"),
        ({"vocab_size": None}, "there is no 'vocab_size'; transformers would assume 32000, so give it"),
        ({"hidden_size": -32}, "'hidden_size' is -32; expected 1 to 4194304"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; expected 1 to 2000"),
        ({"model_type": "swin", "depths": [2, [10**9]]}, "'depths' is 1000000002 in all; expected 1 to 2000"),
        ({"depths": [3_000_000, -3_000_000, 2]}, "'depths' is -3000000; expected 1 to 2000"),
        ({"text_config": {"n_layers": 2001}}, "'n_layers' is 2001; expected 1 to 2000"),
        ({"vocab_size": 10**15}, "'vocab_size' is 1000000000000000; expected 1 to 67108864"),
    ],
)
def test_a_configuration_that_cannot_be_traced_is_one_clear_error(
    change: dict[str, Any], message: str, written: Any
) -> None:
    config = {name: value for name, value in {**LLAMA, **change}.items() if value is not None}
    folder = written(config)
    with pytest.raises(UsageError) as error:
        hugging_face_workload(folder)
    assert str(error.value) == f"{folder}/config.json: {message}"
    assert error.value.exit_status == 2


def test_a_width_or_an_image_s_depth_is_no_number_of_layers(written: Any) -> None:
    assert hugging_face_workload(written({**LLAMA, "max_depth": 10_000, "decoder_layers_dim": 4096})) is not None


def test_an_unknown_model_type_is_answered_with_the_closest_ones(written: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"config\.json: model_type 'lama' is not known to the installed transformers [\d.]+; closest: llama, ",
    ):
        hugging_face_workload(written({**LLAMA, "model_type": "lama"}))


def test_what_transformers_itself_refuses_names_the_file_and_its_reason(written: Any) -> None:
    with pytest.raises(UsageError, match=r"config\.json: transformers refuses it: .*hidden_size"):
        hugging_face_workload(written({**LLAMA, "hidden_size": "wide"}))
    with pytest.raises(UsageError, match=r"config\.json: (building the model failed|transformers refuses it): "):
        hugging_face_workload(written({**LLAMA, "num_attention_heads": 5})).make_model()


def test_code_that_a_model_brings_along_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w').close()")
    config = {**LLAMA, "auto_map": {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="never run here"):
        hugging_face_workload(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON \(JSONDecodeError: .*\); expected a Hugging Face config\.json$"),
        (
            '{"hidden_size": ' + "9" * 5000 + "}",
            r"config\.json is not JSON \(ValueError: Exceeds the limit \(4300 digits\)",
        ),
        ("[1]", r"config\.json holds a JSON list; expected a Hugging Face config\.json, an object$"),
        ("\ud800", r"config\.json is not JSON \(UnicodeDecodeError: .*\); expected a Hugging Face config\.json$"),
        (None, r"there is no file .*config\.json; expected a Hugging Face config\.json or the folder it is in$"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError, match=message):
        hugging_face_workload(str(tmp_path))


def test_a_diffusers_configuration_has_no_length_to_search(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0", "sample_size": 64})
    )
    with pytest.raises(UsageError, match=r"\(UNet2DConditionModel\), whose samples have no length in tokens$"):
        positions_of(str(tmp_path))
