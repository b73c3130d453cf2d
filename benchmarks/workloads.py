"""The training workloads of the CPU benchmarks: activations dominate, a step takes about one to three seconds.

Everything is seeded, so that two processes that build the same workload compute the same losses. Language models read
the source code of the Python standard library byte by byte; vision models read synthetic images.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
_TEXT_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every arm of a benchmark trains in the same way."""

    name: str
    build: Callable[[], nn.Module]
    """Seeds, then returns the model in training mode."""
    batch: Callable[[int], Batch]
    """The batch of a step, by the step's number."""
    loss: Callable[[nn.Module, Batch], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    """The layers that a user would pass to activation checkpointing, in forward order."""
    learning_rate: float = 3e-4

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


class Block(nn.Module):
    """A pre-norm transformer layer; [batch, tokens, width] in and out."""

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, num_heads: int, num_layers: int, max_tokens: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, is_causal=True) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ViT(nn.Module):
    def __init__(self, image: int, patch: int, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads, is_causal=False) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 with batch norm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        widths = (channels_in, channels, channels, 4 * channels)
        layers: list[nn.Module] = []
        for place, (before, after) in enumerate(pairwise(widths)):
            kernel, step = (3, stride) if place == 1 else (1, 1)
            layers += [
                nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if channels_in != 4 * channels:
            self.shortcut.append(nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks, channels_in = nn.ModuleList(), channels
        for stage, depth in enumerate(depths):
            for place in range(depth):
                self.blocks.append(Bottleneck(channels_in, channels << stage, 2 if stage and not place else 1))
                channels_in = 4 * channels << stage
        self.head = nn.Linear(channels_in, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@cache
def _source_code() -> Tensor:
    """Returns the Python standard library's own sources as bytes, in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _text(step: int, batch_size: int, num_tokens: int) -> Batch:
    text, generator = _source_code(), torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - num_tokens - 1, (batch_size,), generator=generator).tolist()
    rows = torch.stack([text[start : start + num_tokens + 1] for start in starts]).long()
    return {"input_ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def _images(step: int, batch_size: int, image: int) -> Batch:
    """Stripes whose frequency tells the class, under noise."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(10, (batch_size,), generator=generator)
    phase = torch.arange(image) * (classes[:, None] + 1) * (2 * torch.pi / image)
    noise = torch.randn(batch_size, 3, image, image, generator=generator)
    return {"images": noise + phase.sin()[:, None, None, :], "targets": classes}


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())


def _llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["targets"])


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build().train()

    return seeded


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="gpt",
            build=_seeded(lambda: GPT(width=256, num_heads=4, num_layers=12, max_tokens=512)),
            batch=lambda step: _text(step, batch_size=7, num_tokens=512),
            loss=_language_loss,
            blocks=_blocks,
        ),
        Workload(
            name="vit",
            build=_seeded(lambda: ViT(image=96, patch=8, width=192, num_heads=3, num_layers=12)),
            batch=lambda step: _images(step, batch_size=32, image=96),
            loss=_image_loss,
            blocks=_blocks,
        ),
        Workload(
            name="resnet",
            build=_seeded(lambda: ResNet(channels=32, depths=(3, 4, 6, 3))),
            batch=lambda step: _images(step, batch_size=32, image=96),
            loss=_image_loss,
            blocks=_blocks,
        ),
        Workload(
            name="llama",
            build=_seeded(_llama),
            batch=lambda step: _text(step, batch_size=7, num_tokens=512),
            loss=_llama_loss,
            blocks=lambda model: list(model.get_submodule("model.layers").children()),
        ),
    )
}
