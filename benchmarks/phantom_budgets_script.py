"""A script that knows nothing of memwall: a small GPT on CUDA; writes each step's peak and a digest of its weights."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def used_bytes() -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def main() -> None:
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (48, 128), generator=torch.Generator().manual_seed(1)).cuda()
    peaks = []
    for _ in range(_NUM_STEPS):
        torch.cuda.reset_peak_memory_stats()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(used_bytes())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    Path(sys.argv[1]).write_text(json.dumps({"peak_bytes": peaks, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
