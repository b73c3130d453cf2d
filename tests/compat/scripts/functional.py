"""A step whose gradients torch.func computes, from parameters in a dictionary."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

torch.manual_seed(0)
WIDTH, BATCH, STEPS = 512, 18432, 4
model = nn.Sequential(
    nn.Linear(32, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)), nn.Linear(WIDTH, 10)
)
weights = {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(weights, data, labels):
    return F.cross_entropy(functional_call(model, weights, data), labels)


for _ in range(STEPS):
    gradients = grad(loss_of)(weights, torch.randn(BATCH, 32), torch.randint(10, (BATCH,)))
    weights = {name: value - 0.1 * gradients[name] for name, value in weights.items()}
print("weights", hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest())
