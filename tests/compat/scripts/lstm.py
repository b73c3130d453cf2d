"""A word model of LSTM layers that carries its hidden state from batch to batch."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, LENGTH, WORDS, STEPS = 384, 128, 64, 2000, 5


class WordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, states):
        x, left = self.drop(self.embed(words)), []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer(x, state)
            left.append(tuple(part.detach() for part in state))
            x = self.drop(x)
        return self.head(x), left


model = WordModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
states = [None] * 3
for _ in range(STEPS):
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    output, states = model(words[:, :-1], states)
    loss = F.cross_entropy(output.flatten(0, 1), words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
