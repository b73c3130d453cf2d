"""Holds the kinds of training that a Hugging Face configuration can mean, and makes up a batch for each of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

Batch = dict[str, "Tensor"]

DEFAULT_SEQUENCE = 2048
"""Tokens of a text model where no length is asked for: enough for activations to show, short of any limit."""
# ImageNet's, for configurations of networks that take any size.
_DEFAULT_IMAGE = 224
# Ten seconds at 16 kHz, the rate that wav2vec 2.0 and its kin are trained with.
_DEFAULT_SAMPLES = 160_000
# Samples per output frame of a CTC model are a few hundred: labels this much shorter always fit.
_SAMPLES_PER_LABEL = 1_600


class Head(Struct, frozen=True):
    """Says of a kind of training which architectures have it, who builds them, and what they are fed."""

    name: str
    task: str
    """Names it in the tables of transformers, as `MODEL_FOR_<task>_MAPPING_NAMES`."""
    kind: str
    """Names it in the classes of transformers, as `AutoModelFor<kind>`."""
    batch: Callable[[Any, int, int | None], Batch]
    is_asked_for_loss: bool = False
    """Whether the model computes its loss only where it is called with `return_loss`, there being no labels."""

    @property
    def auto_class(self) -> Any:
        """Returns the class of transformers that builds its models."""
        import transformers

        return getattr(transformers, f"AutoModelFor{self.kind}")

    def architectures(self, model_type: str) -> tuple[str, ...]:
        """Returns the classes of a model type that have this head."""
        from transformers.models.auto import modeling_auto

        entry = getattr(modeling_auto, f"MODEL_FOR_{self.task}_MAPPING_NAMES").get(model_type, ())
        return (entry,) if isinstance(entry, str) else tuple(entry)


def in_dtype(make: Callable[[], Batch], dtype: str) -> Batch:
    import torch

    return {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for name, value in make().items()
    }


def _tokens(config: Any, batch: int, sequence: int | None) -> "Tensor":
    import torch

    return torch.randint(1, max(2, config.get_text_config().vocab_size), (batch, sequence or DEFAULT_SEQUENCE))


def _text_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Makes up unpadded text, learned token by token; masks and labels are as data collators make them."""
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
    """Makes up what a classifier learns: a class for each sample, or several, or numbers, as the problem type says."""
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


def _paired_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Makes up images and their descriptions, padded to all positions that there are, as CLIP and SigLIP take them."""
    tokens = _tokens(config, batch, config.text_config.max_position_embeddings)
    return {"input_ids": tokens, "pixel_values": _image_batch(config.vision_config, batch, None)["pixel_values"]}


def _speech_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Makes up log-mel frames, and text for the decoder, for Whisper and its kin."""
    most = getattr(config, "max_target_positions", None) or DEFAULT_SEQUENCE
    return {"input_features": _mel_frames(config, batch), "labels": _tokens(config, batch, min(sequence or most, most))}


def _mel_frames(config: Any, batch: int) -> "Tensor":
    """Makes up as many frames as an encoder takes that halves them."""
    import torch

    frames: int = 2 * getattr(config, "max_source_positions", DEFAULT_SEQUENCE // 2)
    bins: int = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
    return torch.randn((batch, bins, frames) if config.model_type == "whisper" else (batch, frames, bins))


def _wave_batch(config: Any, batch: int, sequence: int | None) -> Batch:
    """Makes up wave forms, or for the audio spectrogram transformer what its feature extractor makes of them."""
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


HEADS = (
    Head("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM", "Seq2SeqLM", _text_batch),
    Head("speech", "SPEECH_SEQ_2_SEQ", "SpeechSeq2Seq", _speech_batch),
    Head("masked", "MASKED_LM", "MaskedLM", _text_batch),
    Head("causal", "CAUSAL_LM", "CausalLM", _text_batch),
    Head("image classification", "IMAGE_CLASSIFICATION", "ImageClassification", _image_batch),
    Head("CTC", "CTC", "CTC", _transcribed_audio_batch),
    Head("audio classification", "AUDIO_CLASSIFICATION", "AudioClassification", _classified_audio_batch),
    Head("contrastive", "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZeroShotImageClassification", _paired_batch, True),
    Head("sequence classification", "SEQUENCE_CLASSIFICATION", "SequenceClassification", _classified_text_batch),
    Head("token classification", "TOKEN_CLASSIFICATION", "TokenClassification", _classified_tokens_batch),
)
"""Lists heads in the order in which a model type's heads are tried where a configuration names no architecture."""
TEXT_HEADS = ("seq2seq", "masked", "causal", "sequence classification", "token classification")
ONLY_BY_NAME = ("sequence classification", "token classification")
"""A text model without `architectures` is a language model; these heads come with fine-tuning."""
