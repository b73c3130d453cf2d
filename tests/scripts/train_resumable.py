"""A training loop that can be resumed: dropout, a shuffled draw of its data, a schedule, batch norm, frozen weights."""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

import memwall


class Net(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.middle = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)).relu())
        x = (self.middle(x) + self.frozen(x)).tanh()
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.last(x)
        return out


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 over all weights, buffers and moments."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        for value in state.values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = torch.randn(256, 16)
    model = Net(args.width, args.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in memwall.steps(args.steps):
        batch = data[torch.randint(len(data), (32,))]
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    args.out.write_text(digest(model, optimizer))


if __name__ == "__main__":
    main()
