"""A residual CNN in bfloat16 autocast, with a schedule, a moving average of its weights, and that one's validation."""

import copy
import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, SIZE, EPOCHS, STEPS = 24, 192, 48, 2, 3


class Block(nn.Module):
    def __init__(self, enter, leave, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(enter, leave, 3, stride, 1, bias=False), nn.BatchNorm2d(leave)
        self.conv2, self.norm2 = nn.Conv2d(leave, leave, 3, 1, 1, bias=False), nn.BatchNorm2d(leave)
        self.short = nn.Conv2d(enter, leave, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 1, 1)
        blocks = [Block(WIDTH, WIDTH, 1), Block(WIDTH, WIDTH, 1), Block(WIDTH, 2 * WIDTH, 2)]
        self.blocks, self.head = nn.Sequential(*blocks, Block(2 * WIDTH, 2 * WIDTH, 1)), nn.Linear(2 * WIDTH, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


model = Net()
average = copy.deepcopy(model).requires_grad_(False).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)
for _ in range(EPOCHS):
    model.train()
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(BATCH, 3, SIZE, SIZE)), torch.randint(10, (BATCH,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for kept, present in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                kept.copy_(kept.lerp(present, 0.1) if kept.is_floating_point() else present)
    with torch.no_grad():
        average(torch.randn(BATCH, 3, SIZE, SIZE))
weights = b"".join(p.detach().numpy().tobytes() for m in (model, average) for p in m.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
