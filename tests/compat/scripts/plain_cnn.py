"""A convolutional network of one long sequence of layers, with norms and ReLUs in place."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
BATCH, STEPS = 112, 3


def features(*widths):
    layers, width = [], 3
    for each in widths:
        if each is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(width, each, 3, padding=1), nn.BatchNorm2d(each), nn.ReLU(inplace=True)]
            width = each
    return nn.Sequential(*layers)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = features(24, 24, 24, None, 48, 48, 48, None, 96, 96, 96, None, 192, 192, 192, None)
        self.classifier = nn.Sequential(nn.Linear(192, 192), nn.ReLU(), nn.Dropout(), nn.Linear(192, 10))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(STEPS):
    loss = F.cross_entropy(model(torch.randn(BATCH, 3, 64, 64)), torch.randint(10, (BATCH,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
