"""Batches of sentences of growing length: the longest ones come last."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, WORDS = 256, 16, 1000


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for length in (64, 48, 64, 96, 96, 160, 64, 192, 192):
    loss = F.cross_entropy(model(torch.randint(WORDS, (BATCH, length))), torch.randint(2, (BATCH,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
