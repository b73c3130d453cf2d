"""A convolutional network whose few largest weights are half of its memory, in channels-last order, with RMSprop."""

import hashlib
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.manual_seed(0)
BATCH, STEPS = 8, 3


def double(inputs: int, outputs: int) -> nn.Sequential:
    sizes = (inputs, outputs), (outputs, outputs)
    convolutions = [
        (nn.Conv2d(*pair, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)) for pair in sizes
    ]
    return nn.Sequential(*convolutions[0], *convolutions[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = 3, 32, 128, 512, 1024, 1024, 1024, 1024
        self.stages = nn.ModuleList(double(*pair) for pair in itertools.pairwise(widths))
        self.out = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        for number, stage in enumerate(self.stages):
            x = stage(F.max_pool2d(x, 2) if number else x)
        out: Tensor = self.out(x.mean((2, 3)))
        return out


model = Net().to(memory_format=torch.channels_last)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.9)
for _ in range(STEPS):
    data = torch.randn(BATCH, 3, 64, 64).to(memory_format=torch.channels_last)
    loss = F.cross_entropy(model(data), torch.randint(10, (BATCH,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().contiguous().numpy().tobytes())
print("weights", digest.hexdigest())
