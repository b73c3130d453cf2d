"""A small GPT with tied weights: gradients of four micro-batches a step, clipping, evaluation, and a checkpoint."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, HEADS, BATCH, LENGTH, WORDS, STEPS, PARTS = 256, 4, 8, 128, 1000, 5, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.attention(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf")).softmax(-1)
        x = x + self.output((self.drop(scores) @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(6)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, words, labels):
        x = self.words(words) + self.places.weight[: words.size(1)]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(*torch.randint(WORDS, (2, BATCH, LENGTH)))
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    for _ in range(PARTS):
        loss = model(*torch.randint(WORDS, (2, BATCH, LENGTH))) / PARTS
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
