"""The models that tests trace, predict and plan: small, but with the memory behaviour of the real ones.

Each function takes a size and returns a `Case`: a seeded model, one batch, and a loss of the two. A training step takes
under a tenth of a second at `tiny`, about a second on two cores at `mid`, with several hundred MB of activations.

A plain module on purpose: `import zoo` needs pytest's `pythonpath = ["tests"]`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = Literal["tiny", "mid"]
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """One training workload without its optimizer."""

    model: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor]
    """Forward plus loss; returns a scalar."""


class Attention(nn.Module):
    """Self-attention through scaled_dot_product_attention; [batch, tokens, width] in and out."""

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Feed-forward experts, two per token; how many tokens each gets depends on the data."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            mixed.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return mixed.view_as(x)


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int, is_causal: bool, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, num_heads, is_causal), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A GPT: token and position embeddings, causal blocks, a head; [batch, tokens] in, logits out."""

    def __init__(self, vocabulary: int, max_tokens: int, width: int, num_heads: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, True, layer) for layer in layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class VisionTransformer(nn.Module):
    def __init__(self, image: int, patch: int, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, num_heads, False, FeedForward(width)) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 with batch norm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3, self.norm3 = nn.Conv2d(channels, 4 * channels, 1, bias=False), nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != 4 * channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, channels_in = [], channels
        for number, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                blocks.append(Bottleneck(channels_in, channels << number, 2 if number and not place else 1))
                channels_in = 4 * channels << number
            stages.append(nn.Sequential(*blocks))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels_in, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def _double_conv(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Encoder levels whose outputs live until the matching decoder level reads them."""

    def __init__(self, channels: int, num_levels: int) -> None:
        super().__init__()
        widths = [channels << level for level in range(num_levels)]
        self.encoders = nn.ModuleList(map(_double_conv, [3, *widths], widths))
        self.bottom = _double_conv(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths))
        self.decoders = nn.ModuleList(_double_conv(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat((skips.pop(), up(x)), dim=1))
        return self.head(x)


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["classes"])


def _pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["images"]), batch["images"])


def _hugging_face_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _text(vocabulary: int, batch_size: int, num_tokens: int) -> Batch:
    text = torch.randint(vocabulary, (batch_size, num_tokens + 1))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _images(batch_size: int, image: int) -> Batch:
    return {"images": torch.randn(batch_size, 3, image, image), "classes": torch.randint(10, (batch_size,))}


def gpt(size: Size = "tiny") -> Case:
    """A decoder whose layers are all alike."""
    torch.manual_seed(0)
    width, heads, depth, batch_size, tokens = (32, 2, 3, 4, 32) if size == "tiny" else (256, 4, 8, 4, 512)
    model = Decoder(256, tokens, width, heads, [FeedForward(width) for _ in range(depth)])
    return Case(model, _text(256, batch_size, tokens), _language_loss)


def moe(size: Size = "tiny") -> Case:
    """A decoder with four experts per layer, two per token."""
    torch.manual_seed(0)
    width, heads, depth, batch_size, tokens = (32, 2, 2, 4, 32) if size == "tiny" else (192, 4, 6, 4, 512)
    model = Decoder(256, tokens, width, heads, [Experts(width, 4) for _ in range(depth)])
    return Case(model, _text(256, batch_size, tokens), _language_loss)


def lora(size: Size = "tiny") -> Case:
    """The decoder of `gpt`, frozen, with rank-4 adapters on every linear layer of its blocks."""
    case = gpt(size)
    case.model.requires_grad_(False)
    for parent in list(case.model.modules()):
        if isinstance(parent, Attention | FeedForward):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LoraLinear(child, rank=4))
    return case


def vit(size: Size = "tiny") -> Case:
    """A vision transformer."""
    torch.manual_seed(0)
    image, width, heads, depth, batch_size = (32, 32, 2, 3, 4) if size == "tiny" else (128, 256, 4, 8, 8)
    model = VisionTransformer(image, 8, width, heads, depth)
    return Case(model, _images(batch_size, image), _image_loss)


def resnet(size: Size = "tiny") -> Case:
    """Bottleneck blocks with batch norm and in-place ReLU."""
    torch.manual_seed(0)
    image, channels, depths, batch_size = (32, 8, (1, 1), 4) if size == "tiny" else (160, 32, (2, 2, 2, 2), 32)
    return Case(ResNet(channels, depths), _images(batch_size, image), _image_loss)


def unet(size: Size = "tiny") -> Case:
    """Convolutions with batch norm and skips that span the whole net."""
    torch.manual_seed(0)
    image, channels, num_levels, batch_size = (32, 8, 2, 2) if size == "tiny" else (128, 16, 3, 16)
    return Case(UNet(channels, num_levels), _images(batch_size, image), _pixel_loss)


def encoder(size: Size = "tiny") -> Case:
    """A BERT from Hugging Face Transformers, dropout off, learning masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    width, depth, batch_size, tokens = (32, 2, 4, 32) if size == "tiny" else (192, 6, 8, 512)
    config = BertConfig(
        vocab_size=512, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 16,
        intermediate_size=4 * width, max_position_embeddings=tokens,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    text = torch.randint(512, (batch_size, tokens))
    batch = {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text.clone()}
    return Case(BertForMaskedLM(config).train(), batch, _hugging_face_loss)


def encdec(size: Size = "tiny") -> Case:
    """A T5 from Hugging Face Transformers with dropout, whose encoder's output feeds every decoder layer."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    width, depth, batch_size, tokens = (32, 2, 4, 32) if size == "tiny" else (192, 4, 4, 256)
    config = T5Config(
        vocab_size=512, d_model=width, d_kv=16, d_ff=4 * width, num_layers=depth, num_heads=width // 16,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.1,
    )  # fmt: skip
    text = torch.randint(1, 512, (batch_size, tokens))
    batch = {"input_ids": text, "labels": text.clone()}
    return Case(T5ForConditionalGeneration(config).train(), batch, _hugging_face_loss)


MODELS: dict[str, Callable[[Size], Case]] = {
    build.__name__: build for build in (gpt, encoder, vit, resnet, unet, encdec, moe, lora)
}


def optimizers() -> dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]:
    """Returns one factory per optimizer whose state or temporaries differ from the others'."""
    return {
        "sgd_momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
        "adamw_for_loop": partial(torch.optim.AdamW, lr=1e-3, foreach=False, fused=False),
        "adamw_foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
        "adamw_fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    }


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters an optimizer gets: those not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
