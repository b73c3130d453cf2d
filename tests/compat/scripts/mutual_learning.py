"""Two classifiers that learn from the data and from each other, and a teacher that is only asked."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, STEPS = 256, 64, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


teacher, first, second = Classifier(2).eval(), Classifier(4), Classifier(3)
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (first, second)]
for _ in range(STEPS):
    data, labels = torch.randn(BATCH, 64, 16), torch.randint(10, (BATCH,))
    with torch.no_grad():
        hint = teacher(data).softmax(1)
    one, two = first(data), second(data)
    for optimizer, own, other in zip(optimizers, (one, two), (two, one), strict=True):
        loss = F.cross_entropy(own, labels) + F.cross_entropy(own, hint)
        loss = loss + F.kl_div(own.log_softmax(1), other.detach().softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for m in (first, second) for p in m.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
