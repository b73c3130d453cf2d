"""Trains one step, then fails as scripts do."""

import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step() -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


step()
raise RuntimeError("the data is gone")
