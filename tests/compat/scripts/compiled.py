"""A mixer of tokens and channels that torch.compile has compiled as a whole, with half of its activations saved."""

import hashlib

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch._functorch.config.activation_memory_budget = 0.5
WIDTH, TOKENS, BATCH, LAYERS, STEPS = 192, 64, 96, 6, 5


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 4 * TOKENS), nn.GELU(), nn.Linear(4 * TOKENS, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(48, WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.Sequential(*(Mixer() for _ in range(LAYERS)))

    def forward(self, x):
        return self.leave(self.layers(self.enter(x)).mean(1))


model = torch.compile(Net())
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(STEPS):
    loss = F.cross_entropy(model(torch.randn(BATCH, TOKENS, 48)), torch.randint(10, (BATCH,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
