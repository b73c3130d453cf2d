"""Fine-tuning in stages: first the head alone, by its optimizer, then everything by another one."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, STEPS = 256, 128, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, WIDTH), *(Layer() for _ in range(6)))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))

    def forward(self, x):
        return self.head(self.body(x).mean(1))


model = Classifier()


def train(optimizer):
    for _ in range(STEPS):
        data, labels = torch.randn(BATCH, 64, 16), torch.randint(10, (BATCH,))
        loss = F.cross_entropy(model(data), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


model.body.requires_grad_(False)
train(torch.optim.AdamW(model.head.parameters(), lr=1e-3))
model.body.requires_grad_(True)
train(torch.optim.AdamW(model.parameters(), lr=1e-4))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
