"""Training steps for both routes to a forecast: a ResNet-18 without its library, and a small GPT of transformers."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memwall import Workload

SAMPLES, PIXELS, TOKENS = 32, 224, 512


class Block(nn.Module):
    """Adds two convolutions to what comes in."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.beside = nn.Sequential()
        if stride != 1 or width != width_in:
            self.beside = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x), inplace=True)) + self.beside(x), inplace=True)


def _resnet() -> nn.Module:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks = (Block(before, width, 1 + (width > before)) for before, width in pairwise(widths))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def convolutions() -> Workload:
    return Workload(
        model=_resnet,
        batch=lambda: (torch.zeros(SAMPLES, 3, PIXELS, PIXELS), torch.zeros(SAMPLES, dtype=torch.long)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=768, n_head=12, vocab_size=50257, use_cache=False))


def gpt() -> Workload:
    return Workload(
        model=_gpt,
        batch=lambda: torch.zeros(4, TOKENS, dtype=torch.long),
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=torch.optim.AdamW,
    )


def recurrent() -> Workload:
    """Draws a seed for dropout, and copies weights for each call, in the autocast of the device that it is on."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        with torch.autocast(model.weight_ih_l0.device.type, torch.bfloat16):
            out: Tensor = model(batch)[0].float().sum()
        return out

    return Workload(
        model=lambda: nn.LSTM(256, 512, num_layers=2, dropout=0.1),
        batch=lambda: torch.zeros(128, 32, 256),
        loss=loss,
        optimizer=torch.optim.AdamW,
    )


def selecting() -> Workload:
    """Trains on the rows that a mask selects: how many there are, values say."""
    return Workload(
        model=lambda: nn.Linear(8, 8),
        batch=lambda: torch.zeros(4, 8),
        loss=lambda model, batch: model(batch[batch.sum(1) > 0]).sum(),
        optimizer=torch.optim.AdamW,
    )


def on_its_device() -> Workload:
    """Asks for a device as scripts do, which on the phantom there is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Workload(
        model=lambda: nn.Linear(8, 8).to(device),
        batch=lambda: torch.zeros(4, 8, device=device),
        loss=lambda model, batch: model(batch.to(device)).sum() + torch.arange(4, device=device).sum(),
        optimizer=torch.optim.AdamW,
    )


def looking_up() -> Workload:
    """Trains on rows by their numbers, of which there are as many as there are numbers."""
    return Workload(
        model=lambda: nn.Linear(8, 8),
        batch=lambda: (torch.zeros(4, 8), torch.tensor([0, 2])),
        loss=lambda model, batch: model(batch[0][batch[1]]).sum(),
        optimizer=torch.optim.AdamW,
    )


def broken() -> Workload:
    return Workload(
        model=lambda: nn.Linear(8, 8),
        batch=lambda: torch.zeros(4, 9),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )


def huge() -> Workload:
    """Has a TiB of weights and gradients, which no host of a test has."""
    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(8))),
        batch=lambda: torch.zeros(1, 1 << 17),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
