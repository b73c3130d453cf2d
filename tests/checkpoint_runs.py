"""A script that trains, is interrupted and resumed, as `memwall run --checkpoint` has it."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import MemwallError
from memwall.store.backend import SystemBackend

__all__ = [
    "NUM_STEPS",
    "WIDTH",
    "Counting",
    "Interrupted",
    "Make",
    "Net",
    "Schedule",
    "Script",
    "adamw",
    "cosine",
    "failure_of",
    "run",
]

NUM_STEPS = 6
WIDTH = 24


class Interrupted(Exception):
    """The end of a process, in a test."""


class Net(nn.Module):
    """Dropout, batch norm, and a layer that is not trained."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        out: Tensor = self.last(self.frozen(hidden).tanh())
        return out


Make = Callable[[Any], torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Script:
    """What a training script does, with the places where a test makes it differ."""

    def __init__(
        self,
        make: Make = adamw,
        schedule: Schedule = cosine,
        *,
        numbers: Callable[[], Iterator[int]] = lambda: memwall.steps(NUM_STEPS),
        stop_in: int | None = None,
        width: int = WIDTH,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = Net(width)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make([{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.0}])
        self.schedule = schedule(self.optimizer)
        self.numbers, self.stop_in = numbers, stop_in

    def train(self) -> None:
        for step in self.numbers():
            for _ in range(2):
                x = torch.randn(6, 8) + random.random()
                (self.model(x).square().mean() / 2).backward()
            if step == self.stop_in:
                raise Interrupted
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    @property
    def result(self) -> tuple[nn.Module, Any]:
        return self.model, self.optimizer.state_dict()


def run(script: Callable[[], Script], checkpoint: StepCheckpoint | None = None) -> Script:
    """Runs a script as `memwall run --checkpoint` does; an interruption is the end of its process.

    In a thread, so that the variables of the test are not the script's; each has a number of its own in OpenMP.
    """
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as process:
        return process.submit(_run, script, checkpoint).result()


def _run(script: Callable[[], Script], checkpoint: StepCheckpoint | None) -> Script:
    set_checkpoint(checkpoint)
    completed = False
    made = script()
    handle = None
    if checkpoint is not None:

        def begin(model: nn.Module, _: Any) -> None:
            handle.remove()
            checkpoint.attach(model)

        handle = made.model.register_forward_pre_hook(begin)
    try:
        made.train()
        completed = True
    except Interrupted:
        pass
    finally:
        set_checkpoint(None)
        if checkpoint is not None:
            checkpoint.close(completed=completed)
    if checkpoint is not None and checkpoint.failure is not None:
        raise checkpoint.failure
    return made


def failure_of(script: Callable[[], Script], checkpoint: StepCheckpoint) -> MemwallError:
    with pytest.raises(MemwallError) as caught:
        run(script, checkpoint)
    return caught.value


class Counting(SystemBackend):
    """Counts bytes written to the data file."""

    num_bytes = 0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.num_bytes += len(data)
        return super().pwrite(fd, data, offset)
