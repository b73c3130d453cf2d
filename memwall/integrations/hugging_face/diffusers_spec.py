"""Makes a Workload of a configuration of diffusers: a network that learns to find noise in latents made up for it.

The loss is the mean square of what diffusers' training scripts compare; text encoders and the autoencoder, which those
keep frozen beside the network, or run before, are no part of it.
"""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwall.errors import UsageError
from memwall.integrations.dtypes import parse_dtype
from memwall.integrations.hugging_face.hf_config import check_num_layers, config_path
from memwall.integrations.hugging_face.hf_optimizers import check_optimizer, make_optimizer
from memwall.trace.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULT_SAMPLE = 64
"""Side of a latent where a configuration names none: an image of 512 pixels by the usual autoencoder."""
_CLIP_TOKENS = 77
_T5_TOKENS = 256
"""Tokens of T5's beside CLIP's, as diffusers' pipeline of Stable Diffusion 3 asks for by default."""
_FLUX_TOKENS = 512
_FLUX_PATCHES = 4096
"""Tokens of an image of 1024 pixels, whose latents are joined two by two; the configuration names no size."""
_TIME_IDS = 6
"""Numbers of an image's size and crop that SDXL is told."""
_MOST_SIDE = 1 << 14

_Batch = dict[str, Any]


def diffusers_workload(
    source: str,
    *,
    batch: int = 1,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    is_checkpointed: bool = False,
    lora: str | None = None,
) -> Workload | None:
    """Returns the training step of a network that a configuration of diffusers describes; None of another one.

    Args:
        source: a config.json, or the folder it is in.
        batch: samples in the micro-batch.
        dtype: of weights and activations; None is float32, which a configuration of diffusers does not say.
        optimizer: one of `memwall.integrations.hugging_face.hf_optimizers.OPTIMIZERS`.
        is_checkpointed: the network recomputes its blocks in backward, as by `enable_gradient_checkpointing`.
        sequence, lora: to be left out; given, they are refused.

    Raises:
        UsageError: diffusers is not installed, or the configuration or an argument can't be used.
    """
    path = config_path(source)
    data = None if path is None else _read(path)
    if path is None or data is None:
        return None
    name = _class_name(data)
    if name not in _BATCHES:
        raise UsageError(
            f"{path} is a configuration of diffusers ({name}) whose training is not known; those of "
            f"{', '.join(_BATCHES)} are, each in its own folder (unet/ or transformer/ of a pipeline). For another "
            "write a function that returns a memwall.Workload, and give it as path/file.py:factory"
        )
    unused = [option for option, value in (("--seq", sequence), ("--lora", lora)) if value is not None]
    if unused:
        raise UsageError(f"{path}: {', '.join(unused)} can't be used with a configuration of diffusers; leave it out")
    check_num_layers(path, data)
    if batch < 1:
        raise UsageError(f"batch {batch} is no batch; expected a positive number")
    dtype = "float32" if dtype is None else parse_dtype(dtype, option="--dtype")
    check_optimizer(optimizer)
    try:
        import diffusers
    except ImportError as error:
        raise UsageError(f"{path}: reading it needs diffusers; pip install diffusers") from error
    network = getattr(diffusers, name)
    data = _defaults(network) | data
    return Workload(
        model=partial(_model, str(path), network, data, dtype, is_checkpointed),
        batch=partial(_made, _BATCHES[name], data, batch, dtype),
        loss=_loss,
        optimizer=partial(make_optimizer, optimizer),
    )


def _read(path: Path) -> dict[str, Any] | None:
    """Returns what a file of diffusers says; None where it is another's, which other readers explain."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # no text, no JSON, or a number of more than 4,300 digits
        return None
    is_of_diffusers = isinstance(data, dict) and "_diffusers_version" in data and "_class_name" in data
    return data if is_of_diffusers else None


def _class_name(data: dict[str, Any]) -> str:
    """Returns the class of a network; DiT's had another one before diffusers 0.29."""
    name = str(data["_class_name"])
    is_dit = name == "Transformer2DModel" and data.get("norm_type") == "ada_norm_zero"
    return "DiTTransformer2DModel" if is_dit else name


def _defaults(network: Any) -> dict[str, Any]:
    """Returns what diffusers assumes of a network where a configuration does not say."""
    parameters = inspect.signature(network.__init__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _model(path: str, network: Any, data: dict[str, Any], dtype: str, is_checkpointed: bool) -> Any:
    import torch

    try:
        model = network.from_config(data).to(getattr(torch, dtype))
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ZeroDivisionError) as error:
        message = " ".join(str(error).split())
        raise UsageError(f"{path}: building the network failed: {type(error).__name__}: {message}") from error
    if is_checkpointed:
        model.enable_gradient_checkpointing()
    return model.train()


def _loss(model: Any, batch: _Batch) -> "Tensor":
    from torch.nn import functional

    found = model(**{name: value for name, value in batch.items() if name != "target"}).sample
    return functional.mse_loss(found.float(), batch["target"].float())


# -- batches -----------------------------------------------------------------------------------------------------------


def _made(make: Callable[[dict[str, Any], int], _Batch], data: dict[str, Any], batch: int, dtype: str) -> _Batch:
    import torch

    def cast(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cast(each) for name, each in value.items()}
        return value.to(getattr(torch, dtype)) if value.is_floating_point() else value

    return {name: cast(value) for name, value in make(data, batch).items()}


def _latents(data: dict[str, Any], batch: int, channels: str) -> "Tensor":
    import torch

    size = data["sample_size"] or _DEFAULT_SAMPLE
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    for side in (*sides, data[channels]):
        if isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= _MOST_SIDE:
            raise UsageError(f"a configuration of diffusers: sample_size is {size}, {channels} {data[channels]}")
    return torch.randn(batch, data[channels], *sides)


def _timesteps(batch: int) -> "Tensor":
    import torch

    return torch.randint(0, 1000, (batch,))


def _unet_batch(data: dict[str, Any], batch: int) -> _Batch:
    import torch

    found = {"sample": _latents(data, batch, "in_channels"), "timestep": _timesteps(batch)}
    if data["num_class_embeds"]:
        found["class_labels"] = torch.randint(0, data["num_class_embeds"], (batch,))
    return found | {"target": _latents(data, batch, "out_channels")}


def _conditioned_unet_batch(data: dict[str, Any], batch: int) -> _Batch:
    import torch

    found: _Batch = _unet_batch(data, batch)
    width = data["cross_attention_dim"]
    widest = max(width) if isinstance(width, (list, tuple)) else width
    found["encoder_hidden_states"] = torch.randn(batch, _CLIP_TOKENS, data["encoder_hid_dim"] or widest)
    if data["addition_embed_type"] == "text_time":
        pooled = data["projection_class_embeddings_input_dim"] - _TIME_IDS * data["addition_time_embed_dim"]
        found["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, pooled),
            "time_ids": torch.randn(batch, _TIME_IDS),
        }
    return found


def _dit_batch(data: dict[str, Any], batch: int) -> _Batch:
    import torch

    return {
        "hidden_states": _latents(data, batch, "in_channels"),
        "timestep": _timesteps(batch),
        "class_labels": torch.randint(0, data["num_embeds_ada_norm"], (batch,)),
        "target": _latents(data, batch, "out_channels" if data["out_channels"] else "in_channels"),
    }


def _sd3_batch(data: dict[str, Any], batch: int) -> _Batch:
    import torch

    return {
        "hidden_states": _latents(data, batch, "in_channels"),
        "timestep": _timesteps(batch),
        "encoder_hidden_states": torch.randn(batch, _CLIP_TOKENS + _T5_TOKENS, data["joint_attention_dim"]),
        "pooled_projections": torch.randn(batch, data["pooled_projection_dim"]),
        "target": _latents(data, batch, "out_channels"),
    }


def _flux_batch(data: dict[str, Any], batch: int) -> _Batch:
    import torch

    found: _Batch = {
        "hidden_states": torch.randn(batch, _FLUX_PATCHES, data["in_channels"]),
        "encoder_hidden_states": torch.randn(batch, _FLUX_TOKENS, data["joint_attention_dim"]),
        "pooled_projections": torch.randn(batch, data["pooled_projection_dim"]),
        "timestep": torch.rand(batch),
        "img_ids": torch.zeros(_FLUX_PATCHES, 3),
        "txt_ids": torch.zeros(_FLUX_TOKENS, 3),
        "target": torch.randn(batch, _FLUX_PATCHES, data["out_channels"] or data["in_channels"]),
    }
    return found | ({"guidance": torch.ones(batch)} if data["guidance_embeds"] else {})


_BATCHES: dict[str, Callable[[dict[str, Any], int], _Batch]] = {
    "UNet2DModel": _unet_batch,
    "UNet2DConditionModel": _conditioned_unet_batch,
    "DiTTransformer2DModel": _dit_batch,
    "SD3Transformer2DModel": _sd3_batch,
    "FluxTransformer2DModel": _flux_batch,
}
