"""Calls its model and its backward, but no optimizer."""

import torch

model = torch.nn.Linear(4, 2)
model(torch.ones(3, 4)).sum().backward()
print("done without a step")
