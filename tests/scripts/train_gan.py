"""Training of a generator against two critics of one class: three optimizers, of which one steps more rarely."""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import memwall


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 8)

    def forward(self, noise: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(noise)).relu())
        return out


class Critic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, width), nn.Dropout(0.2), nn.Linear(width, 1)

    def forward(self, sample: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.first(sample).tanh()))
        return out


class Agent:
    """Holds the models where a variable of the loop leads to them, and calls them from functions of its own."""

    def __init__(self, width: int, *, is_scaled: bool) -> None:
        self.generator = Generator(width)
        self.critics = [Critic(width), Critic(width)]
        adam = torch.optim.Adam
        self.steps = [
            adam(critic.parameters(), lr=rate) for critic, rate in zip(self.critics, (1e-2, 3e-3), strict=True)
        ]
        self.generator_step = torch.optim.RMSprop(self.generator.parameters(), lr=1e-3)
        halve = torch.optim.lr_scheduler.StepLR
        # The second critic's first: which of two alike the garbage collector lists first tells nothing.
        self.schedules = [halve(step, 3, gamma=0.7) for step in reversed(self.steps)]
        kind = {"device": "cpu", "init_scale": 8.0, "growth_interval": 2, "enabled": is_scaled}
        self.scalers = [torch.amp.GradScaler(**kind) for _ in self.critics]

    def train_critics(self, real: Tensor) -> None:
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 4))  # changes the statistics of its norm
        for critic, step, scaler in zip(self.critics, self.steps, self.scalers, strict=True):
            for _ in range(2):
                loss = (critic(fake) - critic(real)).mean() + critic(real).square().mean()
                scaler.scale(loss).backward()
                scaler.step(step)
                scaler.update()
                step.zero_grad()
                if critic is self.critics[0]:
                    break
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.5, 0.5)

    def train_generator(self, num_samples: int) -> None:
        fake = self.generator(torch.randn(num_samples, 4))
        (-sum(critic(fake).mean() for critic in self.critics)).backward()
        self.generator_step.step()
        self.generator_step.zero_grad()
        for step in self.steps:
            step.zero_grad()

    def state(self) -> list[object]:
        whole = (self.generator, *self.critics, *self.steps, self.generator_step, *self.schedules, *self.scalers)
        return [one.state_dict() for one in whole]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--stop-in", type=int)
    parser.add_argument("--scaled", action="store_true", help="a gradient scaler for each critic")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    agent = Agent(args.width, is_scaled=args.scaled)
    for step in memwall.steps(args.steps):
        agent.train_critics(torch.randn(8, 8))
        if step == args.stop_in:
            sys.exit(9)
        if step % 3 == 2:
            agent.train_generator(8)
        for schedule in agent.schedules:
            schedule.step()
        print(f"step {step}", flush=True)
    torch.save(agent.state(), args.out)


if __name__ == "__main__":
    main()
