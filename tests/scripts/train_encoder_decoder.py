"""Training of an encoder, a decoder and an output layer, three modules that one Adam steps."""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import memwall


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.norm(self.layer(x)).relu())
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-in", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    encoder, decoder, output = Part(16), Part(16), nn.Linear(16, 4)
    modules = (encoder, decoder, output)
    optimizer = torch.optim.Adam([parameter for module in modules for parameter in module.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    average = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    for step in memwall.steps(6):
        loss = output(decoder(encoder(torch.randn(8, 16)))).square().mean() + average["layer.weight"].square().mean()
        loss.backward()
        if step == args.stop_in:
            sys.exit(9)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for name, value in decoder.named_parameters():
            average[name].lerp_(value.detach(), 0.1)
    states = [module.state_dict() for module in modules]
    torch.save([*states, average, optimizer.state_dict(), schedule.state_dict()], args.out)


if __name__ == "__main__":
    main()
