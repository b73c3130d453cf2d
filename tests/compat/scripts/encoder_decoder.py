"""An encoder and a decoder, two modules that nothing holds together but their one optimizer."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, LENGTH, WORDS, STEPS = 256, 24, 96, 1000, 5


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)])

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(2))

    def forward(self, words, memory):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


encoder, decoder = Encoder(), Decoder()
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(STEPS):
    source, target = torch.randint(WORDS, (2, BATCH, LENGTH))
    output = decoder(target, encoder(source))
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for m in (encoder, decoder) for p in m.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
