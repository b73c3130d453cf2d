"""Cross-validation: a new model and a new optimizer for each fold, in one process."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, STEPS, FOLDS = 256, 24576, 4, 2
digest = hashlib.sha256()
for _ in range(FOLDS):
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(nn.Linear(64, WIDTH), *layers, nn.Linear(WIDTH, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        data, labels = torch.randn(BATCH, 64), torch.randint(10, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(data), labels).backward()
        optimizer.step()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
print("weights", digest.hexdigest())
