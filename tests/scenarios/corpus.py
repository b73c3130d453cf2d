"""A corpus of small training scripts, each with one thing that real scripts do, and how they are registered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, NUM_CLASSES, BATCH = 32, 4, 8


@dataclass
class Script:
    """What a scenario builds: a training script with its pieces in reach."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[[int], Tensor | float]
    """One step of training, by its number; returns the loss."""
    others: Sequence[nn.Module] = ()
    """Modules that are not in `model` and have to come out the same, as copies by moving average."""


@dataclass(frozen=True)
class Scenario:
    """A script of the corpus."""

    name: str
    build: Callable[[], Script]
    blocks: tuple[str, ...] = ("blocks.0", "blocks.1")
    """What a plan's actions name."""
    num_steps: int = 4
    refused: dict[str, str] = field(default_factory=dict)
    """By arm, a part of the one error that it ends in: what cannot be done, and is said."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, blocks: tuple[str, ...] = ("blocks.0", "blocks.1"), num_steps: int = 4, refused: dict[str, str] | None = None
) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Registers the function that builds a script; its docstring says what the script does."""

    def registered(build: Callable[[], Script]) -> Callable[[], Script]:
        name = build.__name__
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, build, blocks, num_steps, refused or {})
        return build

    return registered


class Mlp(nn.Module):
    """Two layers around a residual stream; `between` is for what a scenario does there."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(torch.tanh(self.up(x))))

    def between(self, y: Tensor) -> Tensor:
        return y


class Net(nn.Module):
    """Blocks in a row, and a head."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def batch_of(number: int, *shape: int) -> tuple[Tensor, Tensor]:
    """The batch of a step; it draws from a generator of its own."""
    generator = torch.Generator().manual_seed(1000 + number)
    shape = shape or (BATCH, WIDTH)
    return torch.randn(*shape, generator=generator), torch.randint(NUM_CLASSES, (shape[0],), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def net() -> Net:
    return Net(Mlp(), Mlp())


def stepping(
    model: nn.Module,
    gradients: Callable[[torch.optim.Optimizer, int], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    after_step: Callable[[int], object] | None = None,
    others: Sequence[nn.Module] = (),
) -> Script:
    """The loop whose gradients a function computes, of the step by its number."""
    optimizer = optimizer or adamw(model)

    def step(number: int) -> Tensor:
        loss = gradients(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(number)
        return loss.detach()

    return Script(model, (optimizer,), step, others)


def learning(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    after_step: Callable[[int], object] | None = None,
    others: Sequence[nn.Module] = (),
) -> Script:
    """The loop with another loss, of the batch and its labels."""

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        loss = loss_of(*batch_of(number))
        loss.backward()
        return loss

    return stepping(model, gradients, after_step=after_step, others=others)


def supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: Callable[[int], tuple[Tensor, Tensor]] = batch_of,
    after_forward: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
    others: Sequence[nn.Module] = (),
) -> Script:
    """The plain loop; a scenario adds one thing to it."""

    def gradients(_: torch.optim.Optimizer, number: int) -> Tensor:
        x, y = batch(number)
        loss = F.cross_entropy(model(x), y)
        if after_forward is not None:
            after_forward(number)
        loss.backward()
        return loss

    return stepping(model, gradients, optimizer, after_step=after_step, others=others)
