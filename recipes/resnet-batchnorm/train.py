"""A ResNet with BatchNorm learns which of ten colours fills most of an image; SGD with momentum, test accuracy."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="resnet.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
width, stages, batch, size = (8, (2, 2), 128, 64) if args.tiny else (32, (2, 2, 2), 16, 96)
num_steps = 4 if args.tiny else args.steps
torch.manual_seed(0)
colours = torch.rand(10, 3, 1, 1)


class Residual(nn.Module):
    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, num_in = [], width
        for stage, depth in enumerate(stages):
            for i in range(depth):
                num_out = width << stage
                blocks.append(Residual(num_in, num_out, 2 if stage and i == 0 else 1))
                num_in = num_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(num_in, 10)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def images(number):
    labels = torch.randint(10, (number,))
    is_filled = (torch.rand(number, 1, size, size) < 0.6).float()
    return colours[labels] * is_filled + 0.3 * torch.randn(number, 3, size, size), labels


model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
model.train()
for step in range(num_steps):
    begin = time.perf_counter()
    inputs, labels = images(batch)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)

model.eval()
with torch.no_grad():
    inputs, labels = images(batch)
    print(f"accuracy {(model(inputs).argmax(1) == labels).float().mean():.3f}")
torch.save(model.state_dict(), args.out)
