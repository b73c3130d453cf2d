"""Networks of diffusers are trained from their configurations: each kind gets the batch that its forward takes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.errors import UsageError
from memwall.integrations.hugging_face.hf_spec import hugging_face_workload

VERSION = {"_diffusers_version": "0.30.0"}
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [8, 8],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
} | {"layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
PLAIN_UNET: dict[str, Any] = {
    name: value for name, value in UNET.items() if name not in ("_class_name", "cross_attention_dim")
} | {
    "_class_name": "UNet2DModel",
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}
SDXL: dict[str, Any] = UNET | {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 32,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
DIT: dict[str, Any] = HEADS | {
    "_class_name": "Transformer2DModel",
    "norm_type": "ada_norm_zero",
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
    "norm_elementwise_affine": False,
}
SD3: dict[str, Any] = HEADS | {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 8,
    "pos_embed_max_size": 8,
}
FLUX: dict[str, Any] = HEADS | {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 4,
    "num_single_layers": 1,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 8,
    "guidance_embeds": True,
    "axes_dims_rope": [2, 2, 4],
}


def written(folder: Path, data: dict[str, Any], name: str = "config.json") -> str:
    (folder / name).write_text(json.dumps(VERSION | data))
    return str(folder)


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        hugging_face_workload(source, **options)
    return str(error.value)


@pytest.mark.requires("diffusers")
@pytest.mark.slow
@pytest.mark.parametrize("data", [UNET, PLAIN_UNET, SDXL, DIT, SD3, FLUX], ids=lambda data: str(data["_class_name"]))
def test_a_network_of_each_kind_is_trained(data: dict[str, Any], tmp_path: Path) -> None:
    workload = hugging_face_workload(written(tmp_path, data), batch=2, dtype="bfloat16", is_checkpointed=True)
    model = workload.make_model()
    loss = workload.loss(model, workload.make_batch())
    loss.backward()
    assert torch.isfinite(loss)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == []


@pytest.mark.requires("diffusers")
def test_a_network_that_cannot_be_built_is_refused_in_words(tmp_path: Path) -> None:
    workload = hugging_face_workload(written(tmp_path, UNET | {"norm_num_groups": 3}))
    with pytest.raises(
        UsageError, match=r"building the network failed: ValueError: num_channels .8. must be divisible"
    ):
        workload.make_model()


@pytest.mark.parametrize("count", [10**9, [1000, 1001]])
@pytest.mark.parametrize("name", ["layers_per_block", "transformer_layers_per_block"])
def test_more_layers_than_any_network_has_are_refused_before_one_is_made(
    name: str, count: object, tmp_path: Path
) -> None:
    in_all = " in all" if isinstance(count, list) else ""
    total = sum(count) if isinstance(count, list) else count
    message = refusal(written(tmp_path, UNET | {name: count}))
    assert message == f"{tmp_path / 'config.json'}: '{name}' is {total}{in_all}; expected 1 to 2000"


@pytest.mark.requires("diffusers")
def test_what_a_configuration_leaves_out_is_the_networks_default(tmp_path: Path) -> None:
    batch = hugging_face_workload(written(tmp_path, {"_class_name": "FluxTransformer2DModel"})).make_batch()
    assert batch["encoder_hidden_states"].shape == (1, 512, 4096)
    assert "guidance" not in batch


def test_diffusers_is_asked_for_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    source = written(tmp_path, UNET)
    assert refusal(source) == f"{source}/config.json: reading it needs diffusers; pip install diffusers"


@pytest.mark.parametrize("name", ["config.json", "model_index.json"])
def test_what_is_no_known_network_is_told_where_one_lies(name: str, tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"_class_name": "StableDiffusionPipeline"}, name))
    assert message.startswith(f"{tmp_path / name} is a configuration of diffusers (StableDiffusionPipeline) whose")
    assert "UNet2DConditionModel" in message
    assert "unet/ or transformer/ of a pipeline" in message


@pytest.mark.parametrize(("option", "value"), [("sequence", 16), ("lora", "r=4")])
def test_options_for_text_are_refused(option: str, value: object, tmp_path: Path) -> None:
    names = {"sequence": "--seq", "lora": "--lora"}
    assert f"{names[option]} can't be used" in refusal(written(tmp_path, UNET), **{option: value})
