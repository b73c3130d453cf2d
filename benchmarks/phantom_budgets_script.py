"""A script that knows nothing of memwall: trains a small model on CUDA; writes peaks and a digest of its weights.

python phantom_budgets_script.py MODEL SAID.json
"""

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_STEPS = 4
_WIDTH, _LENGTH, _VOCABULARY, _HEADS = 128, 128, 256, 4


class Block(nn.Module):
    """A pre-norm transformer block: a GPT's with LayerNorm, GELU and dropout, or a Llama's with RMSNorm and SwiGLU."""

    def __init__(self, *, is_llama: bool, is_causal: bool = True, width: int = _WIDTH) -> None:
        super().__init__()
        norm = nn.RMSNorm if is_llama else nn.LayerNorm
        self.is_causal, self.norm_1, self.norm_2 = is_causal, norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if is_llama else None
        self.drop = nn.Dropout(0.0 if is_llama else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(samples, length, 3, _HEADS, width // _HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(attended))
        normed = self.norm_2(x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        return x + self.drop(self.down(inner))


class Language(nn.Module):
    def __init__(self, *, is_llama: bool, num_layers: int = 4, width: int = _WIDTH, length: int = _LENGTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(is_llama=is_llama, width=width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class Vision(nn.Module):
    """An encoder over patches, trained under bfloat16 autocast."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block(is_llama=False, is_causal=False) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).float().square().mean()


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x))))))


class Convolutions(nn.Module):
    def __init__(self, channels: int = 16, num_blocks: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 10)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(num_blocks)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3))).square().mean()


class Rows(nn.Module):
    """Layers whose saved tensors are large and quickly made."""

    def __init__(self, width: int = 64, num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: Language(is_llama=False), lambda: torch.randint(0, _VOCABULARY, (96, _LENGTH))),
    "llama": (lambda: Language(is_llama=True), lambda: torch.randint(0, _VOCABULARY, (80, _LENGTH))),
    "vit": (Vision, lambda: torch.randn(192, 3, 32, 32)),
    "resnet": (Convolutions, lambda: torch.randn(96, 3, 32, 32)),
    # Little of it is activations: weights, gradients and the optimizer's state are what does not fit.
    "wide": (
        lambda: Language(is_llama=True, num_layers=6, width=512),
        lambda: torch.randint(0, _VOCABULARY, (2, _LENGTH)),
    ),
    "mlp": (Rows, lambda: torch.randn(65_536, 64)),
}


def used_bytes() -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def main() -> None:
    name, said = sys.argv[1:]
    torch.manual_seed(0)
    make_model, make_batch = MODELS[name]
    batch, model = make_batch().cuda(), make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built, peaks = [], []

    def begin_peak(*_: object) -> None:
        """What the step before has left free, and is given back until then, is that one's; the first is the build's."""
        built.append(used_bytes())
        torch.cuda.reset_peak_memory_stats()

    model.register_forward_pre_hook(begin_peak)
    for _ in range(_NUM_STEPS):
        with torch.autocast("cuda", torch.bfloat16) if name == "vit" else nullcontext():
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(used_bytes())
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    Path(said).write_text(json.dumps({"build_bytes": built[0], "peak_bytes": peaks, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
