"""Reads a Hugging Face `config.json` from disk: checked first, since transformers fills in what a file leaves out.

Nothing is downloaded and no code that a model brings along is run.
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memwall.errors import MemwallError, UsageError

# Which kernels run is the target's matter; and a name here may be that of a repository to load code from.
_KERNEL_CHOICES = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# Older releases of transformers wrote the second; newer ones read both.
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Fields without which transformers would silently assume another model's size.
_REQUIRED = ("hidden_size", "num_hidden_layers", "vocab_size")
# Beyond these a figure is a typing error: the largest published models have about 130 layers and 10^12 parameters.
_MOST_LAYERS = 2_000
_MOST_WIDTH = 1 << 22
_SIZES = {
    "hidden_size": _MOST_WIDTH,
    "intermediate_size": _MOST_WIDTH,
    "vocab_size": 1 << 26,
    "num_hidden_layers": _MOST_LAYERS,
    "encoder_layers": _MOST_LAYERS,
    "decoder_layers": _MOST_LAYERS,
    "num_decoder_layers": _MOST_LAYERS,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_local_experts": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "image_size": 1 << 16,
    "num_channels": 1 << 12,
}

# Names of numbers of layers, and of lists of them: one for each stage of a network. A largest depth is of images.
_LAYERS = re.compile(r"(?:^|(?<!max)_)(?:layers?|depths?)$|layers_per_block$")
_PER_STAGE = re.compile(r"depths$|layers_per_block$")

# Owner and name, or of the first models the name alone; see `validate_repo_id` of huggingface_hub.
_HUB_NAME = r"\w[\w.-]*/\w[\w.-]*|\w[\w-]*"


def config_path(source: str) -> Path | None:
    """Returns the config.json that `source` names, as a file or as the folder it is in; None if it names neither."""
    path = Path(source)
    if path.is_dir():
        found = path / "config.json"
        pipeline = path / "model_index.json"  # of diffusers, which has one configuration for each part
        return pipeline if pipeline.is_file() and not found.exists() else found
    return path if path.suffix == ".json" else None


def hub_hint(spec: str) -> str:
    """Says what to do with the name of a model on the Hugging Face Hub, where `spec` looks like one."""
    if re.fullmatch(_HUB_NAME, spec) is None or ("/" in spec and Path(spec).parent.is_dir()):
        return ""
    return (
        f". If it is a name on the Hugging Face Hub: nothing is downloaded here, so run `hf download {spec} "
        "config.json --local-dir FOLDER` (where the model is gated, log in and accept its licence on huggingface.co "
        "first), and give FOLDER"
    )


def read_config(path: Path) -> tuple[Any, object]:
    """Returns the transformers configuration of a file, and the dtype that the file names, None if it names none.

    transformers itself gives up on names that torch does not have, so it is not shown that one.

    Raises:
        UsageError: the file is missing or no model configuration, needs custom code, leaves out or exaggerates sizes,
            or is of a model type that the installed transformers does not know.
    """
    data = _read(path)
    check_num_layers(path, data)
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    except ImportError as error:
        raise UsageError(f"{path}: reading it needs transformers; pip install transformers") from error
    _refuse_diffusers(path, data)
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(f"{path}: there is no 'model_type'; expected the config.json of a transformers model")
    if data.get("auto_map"):
        raise UsageError(
            f"{path}: 'auto_map' asks for code that the model brings along, which is never run here; write a "
            "memwall.Workload that builds the model, and give it as path/file.py:factory"
        )
    if data.get("quantization_config"):
        raise UsageError(
            f"{path}: 'quantization_config' asks for quantised weights, which can't be traced yet; remove it to trace "
            "the model unquantised"
        )
    if model_type not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING_NAMES, n=3)
        meant = f"; closest: {', '.join(near)}" if near else ""
        raise UsageError(
            f"{path}: model_type '{model_type}' is not known to the installed transformers "
            f"{transformers.__version__}{meant}"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(_without(data, (*_KERNEL_CHOICES, *_DTYPE_KEYS)))
    except MemwallError:
        raise
    except Exception as error:  # strict configuration classes raise their own kinds
        raise UsageError(f"{path}: transformers refuses it: {_one_line(error)}") from error
    _require_sizes(path, config, data)
    _check_sizes(path, config)
    return config, _written_dtype(data)


def _written_dtype(data: dict[str, Any]) -> object:
    """Returns what the file says; a model of several parts, as text and images, may say it of the text alone."""
    text = data.get("text_config")
    places = (data, text) if isinstance(text, dict) else (data,)
    return next((place[key] for place in places for key in _DTYPE_KEYS if place.get(key) is not None), None)


def _refuse_diffusers(path: Path, data: dict[str, Any]) -> None:
    """Refuses what has no tokens; `diffusers_workload` reads it."""
    if "_class_name" in data and "_diffusers_version" in data:
        raise UsageError(
            f"{path} is a configuration of diffusers ({data['_class_name']}), whose samples have no length in tokens"
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected a Hugging Face config.json or the folder it is in")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no text, no JSON, or a number of more than 4,300 digits
        raise UsageError(f"{path} is not JSON ({_one_line(error)}); expected a Hugging Face config.json") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds a JSON {type(data).__name__}; expected a Hugging Face config.json, an object")
    return data


def _without(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in data.items()
        if name not in names
    }


def _require_sizes(path: Path, config: Any, data: dict[str, Any]) -> None:
    """Checks that a file gives its sizes; composite models keep them in their parts, hierarchical ones in `depths`."""
    if config.sub_configs or "depths" in data:
        return
    for name in _REQUIRED:
        written = config.attribute_map.get(name, name)
        if hasattr(config, name) and name not in data and written not in data:
            raise UsageError(
                f"{path}: there is no '{written}'; transformers would assume {getattr(config, name)}, so give it"
            )


def _check_sizes(path: Path, config: Any) -> None:
    for name, most in _SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if not 1 <= value <= most:
            written = config.attribute_map.get(name, name)
            raise UsageError(f"{path}: '{written}' is {value}; expected 1 to {most}")
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _check_sizes(path, part)


def check_num_layers(path: Path, data: dict[str, Any]) -> None:
    """Refuses a configuration with more layers than any network has: to make them one by one would take for ever.

    Raises:
        UsageError: a number of layers is beyond what is published.
    """
    for name, value in data.items():
        if isinstance(value, dict):
            check_num_layers(path, value)
        if not _LAYERS.search(name):
            continue
        numbers = list(_whole_numbers(value))
        least, most = min(numbers, default=0), sum(numbers) if _PER_STAGE.search(name) else max(numbers, default=0)
        if least < 0 or most > _MOST_LAYERS:
            in_all = " in all" if isinstance(value, list) and least >= 0 else ""
            found = least if least < 0 else most
            raise UsageError(f"{path}: '{name}' is {found}{in_all}; expected 1 to {_MOST_LAYERS}")


def _whole_numbers(value: object) -> Iterator[int]:
    """Iterates over the integers of a value or of lists in lists of them."""
    if isinstance(value, list):
        for each in value:
            yield from _whole_numbers(each)
    elif isinstance(value, int):
        yield value


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
