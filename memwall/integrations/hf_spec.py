"""From a Hugging Face folder or `config.json` to a Workload: the model without weights, and a batch made up for it.

The head is the one that `architectures` names; without it, the usual one of the model type.
"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from memwall.errors import UsageError
from memwall.integrations.dtypes import DTYPES, known_dtype, parse_dtype
from memwall.integrations.hf_config import config_path, read_config
from memwall.integrations.hf_optimizers import check_optimizer, make_optimizer
from memwall.trace.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["hugging_face_workload", "positions_of"]

Batch = dict[str, "Tensor"]

# What a text model gets where no length is asked for: long enough for activations to show, short of any limit.
_DEFAULT_SEQUENCE = 2048
# torch's sizes are 64-bit; a batch of this many tokens has no device to run on.
_MOST_TOKENS = 1 << 31
# ImageNet's, for configurations of networks that take any size.
_DEFAULT_IMAGE = 224
# Ten seconds at 16 kHz, the rate that wav2vec 2.0 and its kin are trained with.
_DEFAULT_SAMPLES = 160_000
# Samples per output frame of a CTC model are a few hundred: labels this much shorter always fit.
_SAMPLES_PER_LABEL = 1_600


class _Head(Struct, frozen=True):
    """A kind of training: which architectures have it, who builds them, what they are fed."""

    name: str
    mapping: str
    auto_class: str
    batch: Callable[[Any, int, int | None], Batch]


def hugging_face_workload(
    source: str,
    *,
    batch: int = 1,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    is_padded: bool = False,
    is_checkpointed: bool = False,
) -> Workload:
    """The training step of a model that a configuration describes.

    Args:
        source: a config.json, or the folder it is in.
        batch: samples in the micro-batch.
        sequence: tokens per sample (audio: samples of the wave form); None takes 2048, or what the model allows if
            that is less. Image models take the size in their configuration, or 224 pixels.
        dtype: of weights and activations, a name of one of `DTYPES`; None takes what the configuration names, as
            transformers loads such a model, and float32 where it names none.
        optimizer: one of `memwall.integrations.hf_optimizers.OPTIMIZERS`.
        is_padded: all texts but the first are padded to `sequence`, so that the batch needs its mask.
        is_checkpointed: the model recomputes its layers in backward, as with the Trainer's `gradient_checkpointing`.

    Raises:
        UsageError: the configuration or one of the other arguments can't be used; the message says why.
    """
    dtype = None if dtype is None else parse_dtype(dtype, option="--dtype")
    check_optimizer(optimizer)
    if batch < 1 or (sequence is not None and sequence < 1) or batch * (sequence or 1) > _MOST_TOKENS:
        raise UsageError(
            f"batch {batch} x sequence {sequence or 'default'} is no batch; expected positive numbers of at most "
            f"{_MOST_TOKENS} tokens"
        )
    path, config, written_dtype, head = _read(source)
    dtype = dtype or _dtype_of(path, written_dtype)
    if head.name in _TEXT_HEADS:
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
    if is_padded:
        make_batch = partial(_padded, make_batch)
    return Workload(
        model=partial(_model, path, config, head, dtype, is_checkpointed),
        batch=partial(_in_dtype, make_batch, dtype),
        loss=_loss,
        optimizer=partial(make_optimizer, optimizer),
    )


def positions_of(source: str) -> int | None:
    """Tokens for which a model of text has positions; None where they are relative, so that nothing limits them.

    Raises:
        UsageError: the configuration can't be used, or samples of its kind are not padded to a number of tokens.
    """
    path, config, _, head = _read(source)
    if head.name not in _TEXT_HEADS:
        kinds = ", ".join(_TEXT_HEADS)
        raise UsageError(f"{path}: batches for {head.name} are not padded to a number of tokens; those for {kinds} are")
    return _positions(config)


def _read(source: str) -> tuple[str, Any, object, _Head]:
    """Path, configuration, the dtype that its file names, and head."""
    path = config_path(source)
    if path is None:
        raise UsageError(f"'{source}' is neither a folder with a config.json nor a .json file")
    config, dtype = read_config(path)
    return str(path), config, dtype, _head_of(str(path), config)


def _dtype_of(path: str, written: object) -> str:
    """The dtype that a configuration names; a model in another one would be a wrong answer, so it is refused."""
    if written is None:
        return "float32"
    found = known_dtype(written) if isinstance(written, str) else None
    if found is None:
        raise UsageError(f"{path}: its dtype {written!r} can't be traced; give --dtype with one of {', '.join(DTYPES)}")
    return found


def _loss(model: Any, batch: Batch) -> "Tensor":
    loss: Tensor = model(**batch).loss
    return loss


# -- the model ---------------------------------------------------------------------------------------------------------


def _head_of(path: str, config: Any) -> _Head:
    """The head of the architecture named, or the first in `_HEADS` that the model type has."""
    from transformers.models.auto import modeling_auto as auto

    named = (config.architectures or [None])[0]
    if named is None:
        for head in _HEADS:
            if config.model_type in getattr(auto, head.mapping) and head.name not in _ONLY_BY_NAME:
                return head
        raise UsageError(
            f"{path}: there is no 'architectures', and model type '{config.model_type}' has none of the heads that "
            f"can be traced ({', '.join(head.name for head in _HEADS)})"
        )
    for head in _HEADS:
        if named in _classes(getattr(auto, head.mapping).get(config.model_type)):
            return head
    heads = {
        name: head.name for head in _HEADS for name in _classes(getattr(auto, head.mapping).get(config.model_type))
    }
    choice = ", ".join(f"{name} ({kind})" for name, kind in heads.items())
    near = difflib.get_close_matches(str(named), heads, n=1)
    raise UsageError(
        f"{path}: architecture '{named}' can't be trained here; "
        + (f"model type '{config.model_type}' has {choice}" if heads else _no_heads(config.model_type))
        + (f"; did you mean {near[0]}" if near else "")
    )


def _no_heads(model_type: str) -> str:
    return f"model type '{model_type}' has none of the heads that can be traced: {', '.join(h.name for h in _HEADS)}"


def _classes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _model(path: str, config: Any, head: _Head, dtype: str, is_checkpointed: bool) -> Any:
    import torch
    import transformers

    auto_class = getattr(transformers, head.auto_class)
    with _offline():
        try:
            model = auto_class.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        except (ValueError, TypeError, RuntimeError, ImportError, AttributeError, ZeroDivisionError) as error:
            message = " ".join(str(error).split())
            raise UsageError(f"{path}: building the model failed: {type(error).__name__}: {message}") from error
    return _checkpointed(path, model).train() if is_checkpointed else model.train()


def _checkpointed(path: str, model: Any) -> Any:
    """With the library's own recomputation, in the way that is the default of its release.

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
    """Whatever a configuration names on the Hub, nothing is fetched."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -- batches -----------------------------------------------------------------------------------------------------------


def _sequence(path: str, config: Any, asked: int | None) -> int:
    """Tokens per sample, within what the model's positions allow."""
    most = _positions(config)
    if most is None:  # positions are relative, as in T5, which was trained with so many
        return asked or min(getattr(config, "n_positions", None) or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
    if asked is not None and asked > most:
        raise UsageError(
            f"sequence {asked} is more than the {most} positions of {path}; lower it, or raise max_position_embeddings"
        )
    return asked or min(most, _DEFAULT_SEQUENCE)


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


def _in_dtype(make: Callable[[], Batch], dtype: str) -> Batch:
    import torch

    return {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for name, value in make().items()
    }


def _padded(make: Callable[[], Batch]) -> Batch:
    """The batch with the last token of all texts but the first left out, as data collators mark it."""
    made = make()
    mask, labels = made["attention_mask"], made["labels"]
    mask[1:, -1] = 0
    if labels.shape == mask.shape:
        labels[1:, -1] = -100
    return made


def _tokens(config: Any, batch: int, sequence: int | None) -> "Tensor":
    import torch

    return torch.randint(1, max(2, config.get_text_config().vocab_size), (batch, sequence or _DEFAULT_SEQUENCE))


def _text_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Unpadded text, learned token by token; masks and labels as data collators make them."""
    import torch

    tokens = _tokens(config, batch, sequence)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _classified_text_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    import torch

    tokens = _tokens(config, batch, sequence)
    end = getattr(config, "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):  # their decoders answer at the one end of each sample
        tokens = tokens.masked_fill(tokens == end, 1 if end != 1 else 0)
        tokens[:, -1] = end
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": _answers(config, batch)}


def _classified_tokens_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    text = _classified_text_batch(config, batch, sequence)
    return {**text, "labels": _classes_of(config, tuple(text["input_ids"].shape))}


def _answers(config: Any, batch: int) -> "Tensor":
    """What a classifier learns: a class for each sample, or where the configuration says so several, or numbers."""
    import torch

    problem = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else None)
    if problem == "multi_label_classification":
        return torch.randint(0, 2, (batch, config.num_labels)).float()
    if problem == "regression":
        return torch.randn((batch, config.num_labels) if config.num_labels > 1 else (batch,))
    return _classes_of(config, (batch,))


def _classes_of(config: Any, shape: tuple[int, ...]) -> "Tensor":
    import torch

    return torch.randint(0, max(1, config.num_labels), shape)


def _image_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    import torch

    size = getattr(config, "image_size", None) or _DEFAULT_IMAGE
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    return {"pixel_values": torch.randn(batch, channels, height, width), "labels": _answers(config, batch)}


def _speech_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Log-mel frames, and text for the decoder: Whisper and its kin."""
    most = getattr(config, "max_target_positions", None) or _DEFAULT_SEQUENCE
    return {"input_features": _mel_frames(config, batch), "labels": _tokens(config, batch, min(sequence or most, most))}


def _mel_frames(config: Any, batch: int) -> "Tensor":
    """As many as an encoder takes that halves them."""
    import torch

    frames: int = 2 * getattr(config, "max_source_positions", _DEFAULT_SEQUENCE // 2)
    bins: int = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
    return torch.randn((batch, bins, frames) if config.model_type == "whisper" else (batch, frames, bins))


def _wave_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Wave forms, or for the audio spectrogram transformer what its feature extractor makes of them."""
    import torch

    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return {"input_values": torch.randn(batch, config.max_length, config.num_mel_bins)}
    return {"input_values": torch.randn(batch, sequence or _DEFAULT_SAMPLES)}


def _classified_audio_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    sound = {"input_features": _mel_frames(config, batch)} if config.model_type == "whisper" else None
    return {**(sound or _wave_batch(config, batch, sequence)), "labels": _classes_of(config, (batch,))}


def _transcribed_audio_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    import torch

    length = max(1, (sequence or _DEFAULT_SAMPLES) // _SAMPLES_PER_LABEL)
    labels = torch.randint(1, max(2, config.vocab_size), (batch, length))
    return {**_wave_batch(config, batch, sequence), "labels": labels}


_HEADS = (
    _Head("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM", _text_batch),
    _Head("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq", _speech_batch),
    _Head("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", _text_batch),
    _Head("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM", _text_batch),
    _Head(
        "image classification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForImageClassification",
        _image_batch,
    ),
    _Head("CTC", "MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC", _transcribed_audio_batch),
    _Head(
        "audio classification",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForAudioClassification",
        _classified_audio_batch,
    ),
    _Head(
        "sequence classification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForSequenceClassification",
        _classified_text_batch,
    ),
    _Head(
        "token classification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForTokenClassification",
        _classified_tokens_batch,
    ),
)
_TEXT_HEADS = ("seq2seq", "masked", "causal", "sequence classification", "token classification")
# A text model without `architectures` is a language model; these heads come with fine-tuning.
_ONLY_BY_NAME = ("sequence classification", "token classification")
