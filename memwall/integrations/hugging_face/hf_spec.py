"""Makes a Workload of a Hugging Face folder or `config.json`: the model without weights, and a batch made up for it.

The head is the one that `architectures` names; without it, the usual one of the model type.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from memwall.errors import UsageError
from memwall.integrations.dtypes import DTYPES, known_dtype, parse_dtype
from memwall.integrations.hugging_face.diffusers_spec import diffusers_workload
from memwall.integrations.hugging_face.hf_config import config_path, read_config
from memwall.integrations.hugging_face.hf_heads import (
    DEFAULT_SEQUENCE,
    HEADS,
    ONLY_BY_NAME,
    TEXT_HEADS,
    Batch,
    Head,
    in_dtype,
)
from memwall.integrations.hugging_face.hf_lora import Lora, parse_lora, with_adapters
from memwall.integrations.hugging_face.hf_optimizers import check_optimizer, make_optimizer
from memwall.integrations.hugging_face.hf_scan import whole_scans
from memwall.trace.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

# torch's sizes are 64-bit; a batch of this many tokens has no device to run on.
_MOST_TOKENS = 1 << 31


def hugging_face_workload(
    source: str,
    *,
    batch: int = 1,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    is_checkpointed: bool = False,
    lora: str | None = None,
) -> Workload:
    """Returns the training step of a model that a configuration describes.

    Args:
        source: a config.json, or the folder it is in; also one of diffusers (`diffusers_workload`).
        batch: samples in the micro-batch.
        sequence: tokens per sample (audio: samples of the wave form); None takes 2048, or what the model allows if
            that is less. Image models take the size in their configuration, or 224 pixels.
        dtype: of weights and activations, a name of one of `DTYPES`; None takes what the configuration names, as
            transformers loads such a model, and float32 where it names none.
        optimizer: one of `memwall.integrations.hugging_face.hf_optimizers.OPTIMIZERS`.
        is_checkpointed: the model recomputes its layers in backward, as with the Trainer's `gradient_checkpointing`.
        lora: the adapters that are trained in place of the weights, see `parse_lora`; None trains the weights.

    Raises:
        UsageError: the configuration or one of the other arguments can't be used; the message says why.
    """
    of_diffusers = diffusers_workload(
        source,
        batch=batch,
        sequence=sequence,
        dtype=dtype,
        optimizer=optimizer,
        is_checkpointed=is_checkpointed,
        lora=lora,
    )
    if of_diffusers is not None:
        return of_diffusers
    dtype = None if dtype is None else parse_dtype(dtype, option="--dtype")
    check_optimizer(optimizer)
    adapters = None if lora is None else parse_lora(lora)
    if batch < 1 or (sequence is not None and sequence < 1) or batch * (sequence or 1) > _MOST_TOKENS:
        raise UsageError(
            f"batch {batch} x sequence {sequence or 'default'} is no batch; expected positive numbers of at most "
            f"{_MOST_TOKENS} tokens"
        )
    path, config, written_dtype, head = _read(source)
    if adapters is not None and head.name in ONLY_BY_NAME:
        raise UsageError(
            f"{path}: --lora for {head.name}: there PEFT trains the classifier as well, beside the adapters, and these "
            "forecasts do not; give a factory, module:function, whose model is that of get_peft_model"
        )
    dtype = dtype or _dtype_of(path, written_dtype)
    if head.name in TEXT_HEADS:
        sequence = _sequence(path, config, sequence)
    config.use_cache = False  # as transformers' Trainer sets it
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)  # the peak is that of a step that happens to leave out no layer
    if head.name == "sequence classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # files of transformers 5 lack it
    make_batch = partial(head.batch, config, batch, sequence)
    return Workload(
        model=partial(_model, path, config, head, dtype, is_checkpointed, adapters),
        batch=partial(in_dtype, make_batch, dtype),
        loss=_returned_loss if head.is_asked_for_loss else _loss,
        optimizer=partial(make_optimizer, optimizer),
    )


def positions_of(source: str) -> int | None:
    """Returns for how many tokens a model of text has positions; None where they are relative: nothing limits them.

    Raises:
        UsageError: the configuration can't be used, or samples of its kind are not padded to a number of tokens.
    """
    path, config, _, head = _read(source)
    if head.name not in TEXT_HEADS:
        kinds = ", ".join(TEXT_HEADS)
        raise UsageError(f"{path}: batches for {head.name} are not padded to a number of tokens; those for {kinds} are")
    return _positions(config)


def _read(source: str) -> tuple[str, Any, object, Head]:
    """Returns path, configuration, the dtype that its file names, and head."""
    path = config_path(source)
    if path is None:
        raise UsageError(f"'{source}' is neither a folder with a config.json nor a .json file")
    config, dtype = read_config(path)
    return str(path), config, dtype, _head_of(str(path), config)


def _dtype_of(path: str, written: object) -> str:
    """Returns the dtype that a configuration names; one that can't be traced is refused, as another would be wrong."""
    if written is None:
        return "float32"
    found = known_dtype(written) if isinstance(written, str) else None
    if found is None:
        raise UsageError(f"{path}: its dtype {written!r} can't be traced; give --dtype with one of {', '.join(DTYPES)}")
    return found


def _loss(model: Any, batch: Batch) -> "Tensor":
    with whole_scans(model):
        loss: Tensor = model(**batch).loss
    return loss


def _returned_loss(model: Any, batch: Batch) -> "Tensor":
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


# -- the model ---------------------------------------------------------------------------------------------------------


def _head_of(path: str, config: Any) -> Head:
    """Returns the head of the architecture named, or the first of `HEADS` that the model type has."""
    known = {head: head.architectures(config.model_type) for head in HEADS}
    none = f"model type '{config.model_type}' has none of the heads that can be traced"
    every = ", ".join(head.name for head in HEADS)
    named = (config.architectures or [None])[0]
    if named is None:
        usual = next((head for head in HEADS if known[head] and head.name not in ONLY_BY_NAME), None)
        if usual is None:
            raise UsageError(f"{path}: there is no 'architectures', and {none} ({every})")
        return usual
    for head, names in known.items():
        if named in names:
            return head
    kinds = {name: head.name for head, names in known.items() for name in names}
    choice = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    near = difflib.get_close_matches(str(named), kinds, n=1)
    raise UsageError(
        f"{path}: architecture '{named}' can't be trained here; "
        + (f"model type '{config.model_type}' has {choice}" if kinds else f"{none}: {every}")
        + (f"; did you mean {near[0]}" if near else "")
    )


def _model(path: str, config: Any, head: Head, dtype: str, is_checkpointed: bool, adapters: Lora | None) -> Any:
    import torch

    auto_class = head.auto_class
    with _offline():
        try:
            model = auto_class.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        except (ValueError, TypeError, RuntimeError, ImportError, AttributeError, ZeroDivisionError) as error:
            message = " ".join(str(error).split())
            raise UsageError(f"{path}: building the model failed: {type(error).__name__}: {message}") from error
    if adapters is not None:
        model = with_adapters(path, model, adapters)
    return _checkpointed(path, model).train() if is_checkpointed else model.train()


def _checkpointed(path: str, model: Any) -> Any:
    """Turns on the library's own recomputation, in the way that is the default of its release.

    Source: transformers 5.23, trainer.py, `_inner_training_loop`; before release 5 the method had its old name.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UsageError(f"{path}: {type(model).__name__} does not support gradient checkpointing; leave it out")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextmanager
def _offline() -> Iterator[None]:
    """Keeps the library from fetching anything that a configuration names on the Hub."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -- the length of a sample --------------------------------------------------------------------------------------------


def _sequence(path: str, config: Any, asked: int | None) -> int:
    """Returns the tokens of a sample, within what the model's positions allow."""
    most = _positions(config)
    if most is None:  # positions are relative, as in T5, which was trained with so many
        return asked or min(getattr(config, "n_positions", None) or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    if asked is not None and asked > most:
        raise UsageError(
            f"sequence {asked} is more than the {most} positions of {path}; lower it, or raise max_position_embeddings"
        )
    return asked or min(most, DEFAULT_SEQUENCE)


def _positions(config: Any) -> int | None:
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    return most - (config.pad_token_id or 0) - 1 if config.model_type in _OFFSET_POSITIONS else most


# They number positions from pad_token_id + 1 on, as fairseq's RoBERTa did.
_OFFSET_POSITIONS = (
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "longformer",
    "esm",
)
