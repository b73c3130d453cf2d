"""Trains, then ends with a status of its own."""

import sys

import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
sys.exit(3)
