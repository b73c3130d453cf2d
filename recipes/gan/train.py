"""A DCGAN on images of coloured squares: two models and two optimizers, which step in turn."""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="gan.pt", help="where the trained weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
args = parser.parse_args()
width, batch = (16, 256) if args.tiny else (64, 96)
num_steps = 4 if args.tiny else args.steps
torch.manual_seed(0)

# 100 numbers -> an image of 3 x 64 x 64.
generator = nn.Sequential(
    nn.ConvTranspose2d(100, 8 * width, 4, 1, 0, bias=False), nn.BatchNorm2d(8 * width), nn.ReLU(True),
    nn.ConvTranspose2d(8 * width, 4 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(True),
    nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(True),
    nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
    nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(4 * width, 8 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(8 * width), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0),
)  # fmt: skip
for module in (*generator.modules(), *discriminator.modules()):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)


def squares(number):
    """Images with one square each, of a random colour at a random place."""
    images = torch.full((number, 3, 64, 64), -1.0)
    for image in images:
        top, left = torch.randint(0, 32, (2,)).tolist()
        image[:, top : top + 32, left : left + 32] = torch.rand(3, 1, 1) * 2 - 1
    return images


optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(batch), torch.zeros(batch)

for step in range(num_steps):
    begin = time.perf_counter()
    optimizer_d.zero_grad()
    loss_real = criterion(discriminator(squares(batch)), ones)
    loss_real.backward()
    fake = generator(torch.randn(batch, 100, 1, 1))
    loss_fake = criterion(discriminator(fake.detach()), zeros)
    loss_fake.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    loss_d = loss_real.item() + loss_fake.item()
    print(f"step {step}: loss {loss_d:.6f} {loss_g.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)

torch.save({"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, args.out)
