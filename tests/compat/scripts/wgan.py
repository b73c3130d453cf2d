"""A Wasserstein GAN: three critic steps, with clipped weights, for each generator step."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, ROUNDS = 128, 24576, 3


def network(inputs, outputs):
    layers = [nn.Linear(inputs, WIDTH)]
    for _ in range(5):
        layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


generator, critic = network(16, 64), network(64, 1)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
for _ in range(ROUNDS):
    for _ in range(3):
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, 16))
        loss = critic(fake).mean() - critic(torch.randn(BATCH, 64)).mean()
        optimizer_c.zero_grad()
        loss.backward()
        optimizer_c.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.01, 0.01)
    loss = -critic(generator(torch.randn(BATCH, 16))).mean()
    optimizer_g.zero_grad()
    loss.backward()
    optimizer_g.step()
weights = b"".join(p.detach().numpy().tobytes() for m in (generator, critic) for p in m.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
