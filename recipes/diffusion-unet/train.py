"""A diffusion model: a U-Net predicts the noise in images of squares, and an average of its weights is kept."""

import argparse
import copy
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="unet.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
width, batch, size = (16, 64, 48) if args.tiny else (32, 36, 64)
num_steps, num_times = 3 if args.tiny else args.steps, 1000
torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, num_in), nn.GroupNorm(8, num_out)
        self.conv1, self.conv2 = nn.Conv2d(num_in, num_out, 3, 1, 1), nn.Conv2d(num_out, num_out, 3, 1, 1)
        self.time, self.skip = nn.Linear(4 * width, num_out), nn.Conv2d(num_in, num_out, 1)

    def forward(self, x, time_features):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time_features)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList([Residual(width, width), Residual(width, 2 * width)])
        self.middle = Residual(2 * width, 2 * width)
        self.up = nn.ModuleList([Residual(4 * width, width), Residual(2 * width, width)])
        self.last = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x, times):
        rates = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
        angles = times[:, None] * rates
        t = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x, t)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, t)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1), t)
        return self.last(x)


def squares(number):
    images = torch.full((number, 3, size, size), -1.0)
    for image in images:
        top, left = torch.randint(0, size // 2, (2,)).tolist()
        image[:, top : top + size // 2, left : left + size // 2] = torch.rand(3, 1, 1) * 2 - 1
    return images


betas = torch.linspace(1e-4, 0.02, num_times)
kept_share = (1 - betas).cumprod(0)
model = UNet()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
for step in range(num_steps):
    begin = time.perf_counter()
    images, times = squares(batch), torch.randint(num_times, (batch,))
    noise, share = torch.randn_like(images), kept_share[times][:, None, None, None]
    loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, times), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.01)
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save({"model": model.state_dict(), "average": average.state_dict()}, args.out)
