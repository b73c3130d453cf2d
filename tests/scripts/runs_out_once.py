"""Trains four steps, asking memwall where to begin; runs out of memory in the third one, unless told not to."""

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import memwall

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in memwall.steps(4):
    loss = model(torch.randn(512, 64)).square().mean()
    if step == 2 and sys.argv[1] == "fails":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save_file(model.state_dict(), sys.argv[2])
