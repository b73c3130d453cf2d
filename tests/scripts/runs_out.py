"""Asks for more memory than any machine has, in the step and the phase that it is told."""

import sys

import torch
from torch import nn

phase, fails_at = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(4, 8)).sum()
    if (phase, step) == ("step", fails_at):
        torch.empty(1 << 60, dtype=torch.uint8)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(4, 8))
    if (phase, step) == ("evaluation", fails_at):
        torch.empty(1 << 60, dtype=torch.uint8)
