"""A GPT on bytes of this repository's pages: memory-mapped data, accumulation, clipping, warm-up, evaluation."""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from prepare import prepare
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, default=Path("."), help="folder of train.bin and val.bin; made if missing")
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="nanogpt.pt", help="where the checkpoint goes")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, num_heads, width, block_size, batch = (4, 4, 128, 128, 16) if args.tiny else (6, 4, 256, 256, 6)
num_steps, eval_every = (4, 2) if args.tiny else (args.steps, 5)
accumulate, learning_rate, warm_up, dropout = 2, 6e-4, 2, 0.1
torch.manual_seed(1337)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(rows, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.c_proj(seen.transpose(1, 2).reshape(rows, length, width)), dropout, self.training)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def get_batch(split):
    data = np.memmap(args.data / f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch,)).tolist()
    rows = torch.stack([torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate():
    model.eval()
    loss = sum(model(*get_batch("val")).item() for _ in range(2)) / 2
    model.train()
    return loss


if not (args.data / "train.bin").exists():
    prepare(args.data)
model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=learning_rate
)
for step in range(num_steps):
    begin = time.perf_counter()
    progress = min(1.0, max(0, step - warm_up) / max(1, num_steps - warm_up))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
    total = 0.0
    for _ in range(accumulate):
        loss = model(*get_batch("train")) / accumulate
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {total:.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
    if (step + 1) % eval_every == 0:
        print(f"validation loss {evaluate():.6f}", flush=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, args.out)
torch.save({"model": model.state_dict()}, args.out)
