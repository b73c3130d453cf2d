"""A GPT of plain PyTorch on this CPU learns to repeat what it has just read."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="gpt.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
num_layers, width, length, batch = (4, 128, 128, 16) if args.tiny else (8, 256, 256, 6)
num_words, num_heads = 512, 4
num_steps = 3 if args.tiny else args.steps
torch.manual_seed(0)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(num_steps):
    begin = time.perf_counter()
    half = torch.randint(num_words, (batch, length // 2 + 1))
    tokens = torch.cat([half, half], 1)[:, : length + 1]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save(model.state_dict(), args.out)
