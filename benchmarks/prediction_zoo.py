"""The frozen zoo of `prediction.py`: twelve families, six optimizers, three precisions, all small enough for one core.

Whoever changes this file invalidates published results: they carry its hash, and a test compares. Models come with
random weights, from transformers where it has the family; each is as deep as it takes for backward to set the peak in
some of the cases and the optimizer in others.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.trace.workload import Workload

Precision = Literal["float32", "autocast-bfloat16", "bfloat16"]
Batch = dict[str, Tensor]
Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

PRECISIONS: tuple[Precision, ...] = ("float32", "autocast-bfloat16", "bfloat16")
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=1e-4),
    "adamw-for-loop": partial(torch.optim.AdamW, lr=1e-4, foreach=False, fused=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
"""One for each way of holding state and temporaries; learning rates decide nothing about memory."""


class Family(NamedTuple):
    """One architecture at one size."""

    model: Callable[[], nn.Module]
    """Made in torch's default dtype."""
    batch: Callable[[int], Batch]
    """So many samples; floating-point tensors in torch's default dtype."""
    loss: Callable[[Any, Batch], Tensor]
    num_samples: int
    """Divisible by four: two probes run a quarter and a half of it."""
    mask_share: float | None = None
    """Share that data-dependent masks select, where there are any."""


def workload(family: str, optimizer: str, precision: Precision, num_samples: int | None = None) -> Workload:
    """One case of the zoo; `num_samples` in place of the family's own."""
    chosen = FAMILIES[family]
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32

    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast-bfloat16"):
            return chosen.loss(model, batch)

    return Workload(
        model=partial(_seeded, dtype, lambda: chosen.model().train()),
        batch=partial(_seeded, dtype, partial(chosen.batch, num_samples or chosen.num_samples)),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
    )


def zoo_sha256() -> str:
    """Hash of this file: what a result was measured on."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _seeded(dtype: torch.dtype, make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with _default_dtype(dtype):
        return make()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- models that transformers does not have ----------------------------------------------------------------------------


class UNet(nn.Module):
    """Encoder levels whose outputs live until the matching decoder level reads them; images in and out."""

    def __init__(self, channels: int, num_levels: int) -> None:
        super().__init__()
        widths = [channels << level for level in range(num_levels)]
        self.encoders = nn.ModuleList(map(self._double, [3, *widths], widths))
        self.bottom = self._double(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths))
        self.decoders = nn.ModuleList(self._double(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(channels, 3, 1)

    @staticmethod
    def _double(before: int, after: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat((skips.pop(), up(x)), dim=1))
        out: Tensor = self.head(x)
        return out


class Recurrent(nn.Module):
    """A bidirectional LSTM and a GRU above it, which read text token by token."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.gru(self.lstm(self.tokens(input_ids))[0])[0]
        out: Tensor = self.head(x)
        return out


# -- models of transformers --------------------------------------------------------------------------------------------


def _pretrained_class(name: str, **fields: Any) -> nn.Module:
    """A model of transformers from its class and the fields of its configuration."""
    import transformers

    model_class = getattr(transformers, name)
    model: nn.Module = model_class._from_config(model_class.config_class(**fields), dtype=torch.get_default_dtype())
    return model


def _own_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _pixel_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["images"]), batch["images"])


def _next_token_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _text(vocabulary: int, num_tokens: int, num_samples: int) -> Batch:
    tokens = torch.randint(1, vocabulary, (num_samples, num_tokens))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _classified_images(size: int, num_samples: int) -> Batch:
    return {"pixel_values": torch.randn(num_samples, 3, size, size), "labels": torch.randint(2, (num_samples,))}


def _images(size: int, num_samples: int) -> Batch:
    return {"images": torch.randn(num_samples, 3, size, size)}


def _speech(num_bins: int, num_frames: int, vocabulary: int, num_tokens: int, num_samples: int) -> Batch:
    labels = torch.randint(1, vocabulary, (num_samples, num_tokens))
    return {"input_features": torch.randn(num_samples, num_bins, num_frames), "labels": labels}


_LLAMA = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_cache": False,
}

FAMILIES: dict[str, Family] = {
    "resnet": Family(
        partial(
            _pretrained_class,
            "ResNetForImageClassification",
            embedding_size=32,
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 2, 2, 2],
            layer_type="basic",
        ),
        partial(_classified_images, 96),
        _own_loss,
        16,
    ),
    "mobilenet": Family(
        partial(_pretrained_class, "MobileNetV2ForImageClassification", depth_multiplier=0.5, image_size=96),
        partial(_classified_images, 96),
        _own_loss,
        16,
    ),
    "convnext": Family(
        partial(
            _pretrained_class,
            "ConvNextForImageClassification",
            hidden_sizes=[40, 80, 160, 320],
            depths=[2, 2, 4, 2],
            image_size=96,
        ),
        partial(_classified_images, 96),
        _own_loss,
        12,
    ),
    "vit": Family(
        partial(
            _pretrained_class,
            "ViTForImageClassification",
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=3,
            image_size=112,
            patch_size=8,
        ),
        partial(_classified_images, 112),
        _own_loss,
        8,
    ),
    "bert": Family(
        partial(
            _pretrained_class,
            "BertForMaskedLM",
            vocab_size=8192,
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
        ),
        partial(_text, 8192, 128),
        _own_loss,
        8,
    ),
    "gpt2": Family(
        partial(
            _pretrained_class,
            "GPT2LMHeadModel",
            vocab_size=4096,
            n_embd=192,
            n_layer=4,
            n_head=4,
            n_positions=256,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        partial(_text, 4096, 256),
        _own_loss,
        4,
    ),
    "llama": Family(
        partial(_pretrained_class, "LlamaForCausalLM", vocab_size=32_000, **_LLAMA),
        partial(_text, 32_000, 128),
        _own_loss,
        4,
    ),
    "mixtral": Family(
        partial(
            _pretrained_class,
            "MixtralForCausalLM",
            vocab_size=4096,
            num_local_experts=4,
            num_experts_per_tok=2,
            **{**_LLAMA, "num_hidden_layers": 2},
        ),
        partial(_text, 4096, 128),
        _own_loss,
        4,
        mask_share=0.25,
    ),
    "t5": Family(
        partial(
            _pretrained_class,
            "T5ForConditionalGeneration",
            vocab_size=4096,
            d_model=192,
            d_kv=48,
            d_ff=512,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        partial(_text, 4096, 128),
        _own_loss,
        8,
    ),
    "whisper": Family(
        partial(
            _pretrained_class,
            "WhisperForConditionalGeneration",
            vocab_size=4096,
            d_model=192,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=512,
            decoder_ffn_dim=512,
            num_mel_bins=40,
            max_source_positions=250,
            max_target_positions=64,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        ),
        partial(_speech, 40, 500, 4096, 64),
        _own_loss,
        4,
    ),
    "unet": Family(partial(UNet, 16, 3), partial(_images, 64), _pixel_loss, 8),
    "recurrent": Family(partial(Recurrent, 4096, 192), partial(_text, 4096, 32), _next_token_loss, 8),
}
