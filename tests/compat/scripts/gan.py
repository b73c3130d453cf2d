"""A convolutional GAN: two models, two optimizers, each step of one following a step of the other."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, BATCH, STEPS = 12, 448, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(32, 4 * WIDTH, 4, 1, 0, bias=False), nn.BatchNorm2d(4 * WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.Conv2d(WIDTH, 3, 3, 1, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, 1, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, WIDTH, 4, 2, 1), nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 4, 2, 1), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * WIDTH, 1, 8, 1, 0), nn.Flatten(),
        )  # fmt: skip

    def forward(self, images):
        return self.main(images)


generator, discriminator = Generator(), Discriminator()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for _ in range(STEPS):
    optimizer_d.zero_grad()
    real = torch.rand(BATCH, 3, 64, 64)
    criterion(discriminator(real), torch.ones(BATCH, 1)).backward()
    fake = generator(torch.randn(BATCH, 32, 1, 1))
    criterion(discriminator(fake.detach()), torch.zeros(BATCH, 1)).backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss = criterion(discriminator(fake), torch.ones(BATCH, 1))
    loss.backward()
    optimizer_g.step()
weights = b"".join(p.detach().numpy().tobytes() for m in (generator, discriminator) for p in m.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
