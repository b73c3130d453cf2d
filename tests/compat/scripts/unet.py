"""A small diffusion model: a U-Net that predicts noise, with steps drawn at random and an average kept by hand."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, SIZE, STEPS = 32, 128, 32, 3


class Block(nn.Module):
    def __init__(self, enter, leave):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, enter), nn.Conv2d(enter, leave, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(4, leave), nn.Conv2d(leave, leave, 3, 1, 1)
        self.time, self.short = nn.Linear(64, leave), nn.Conv2d(enter, leave, 1)

    def forward(self, x, time):
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(hidden))) + self.short(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, 3, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64))
        widths = [WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([WIDTH, *widths], widths, strict=False))
        self.up = nn.ModuleList(Block(2 * b, a) for a, b in zip([WIDTH, *widths], widths, strict=False))

    def forward(self, x, time):
        time, x, kept = self.time(time[:, None]), self.enter(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in reversed(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1), time)
        return self.leave(x)


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
average = [parameter.detach().clone() for parameter in model.parameters()]
for _ in range(STEPS):
    image, noise, time = torch.randn(BATCH, 3, SIZE, SIZE), torch.randn(BATCH, 3, SIZE, SIZE), torch.rand(BATCH)
    noisy = image * time[:, None, None, None].cos() + noise * time[:, None, None, None].sin()
    loss = F.mse_loss(model(noisy, time), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for kept, parameter in zip(average, model.parameters(), strict=True):
        kept.lerp_(parameter.detach(), 0.01)
weights = b"".join(t.detach().numpy().tobytes() for t in [*model.parameters(), *average])
print("weights", hashlib.sha256(weights).hexdigest())
