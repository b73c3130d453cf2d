"""A student learns from a teacher whose weights are new tensors in each step: averages, assigned to `.data`."""

import copy
import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, STEPS = 512, 512, 4
layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)]
student = nn.Sequential(*layers, nn.LayerNorm(WIDTH))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for _ in range(STEPS):
    data = torch.randn(BATCH, WIDTH)
    loss = F.mse_loss(student(data + 0.1 * torch.randn_like(data)), teacher(data))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
        old.data = 0.9 * old.data + 0.1 * new.data
digest = hashlib.sha256()
for model in (student, teacher):
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
print("weights", digest.hexdigest())
