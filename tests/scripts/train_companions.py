"""Training with all that goes beside a model: averages, a teacher, generators, a sampler, a schedule by hand."""

import argparse
import copy
import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import RandomSampler

import memwall


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        if self.training:
            x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        out: Tensor = self.last(x)
        return out


class Temperature:
    """Is a schedule of the script's own."""

    def __init__(self) -> None:
        self.value = 1.0

    def update(self, loss: float) -> None:
        self.value *= 0.9 if loss < 1.0 else 0.99

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Average:
    """Is a moving average as many scripts have it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.05)


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for value in tensors.values():
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stop-in", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    data = torch.randn(256, 16)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    teacher = copy.deepcopy(model).eval()
    shadow = Average(model)
    temperature = Temperature()
    draws, flips, picks = np.random.default_rng(3), random.Random(4), torch.Generator().manual_seed(6)
    sampler = RandomSampler(range(256), generator=picks, num_samples=32)
    for step in memwall.steps(args.steps):
        x = data[list(sampler)] * float(draws.uniform(0.5, 1.5)) * (1 if flips.random() < 0.5 else -1)
        with torch.no_grad():
            wanted = teacher(x) / temperature.value
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        if step == args.stop_in:
            os._exit(9)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        shadow.update(model)
        temperature.update(loss.item())
        for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(its.data, 0.1)
    found = {
        "model": digest(model.state_dict()),
        "average": digest(average.state_dict()),
        "teacher": digest(teacher.state_dict()),
        "shadow": digest(shadow.shadow),
        "temperature": temperature.value,
        "draws": [float(draws.uniform()), flips.random(), torch.randn(1, generator=picks).item()],
        "noise": torch.randn(1, generator=model.noise).item(),
    }
    args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
