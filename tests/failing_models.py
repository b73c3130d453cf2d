"""Models whose forward or backward runs out of memory where it is told to."""

import hashlib
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from memwall.session.session import Session

__all__ = ["NUM_STEPS", "SAMPLES", "Block", "Bomb", "Model", "everything", "made", "train"]

SAMPLES, NUM_STEPS = 512, 4


class Bomb:
    """Fails so often at a place, as torch does when a device is full.

    It is no state of the model that holds it, which would be put back: nothing is found in an object with slots.
    """

    __slots__ = ("asked", "num_left", "place")

    def __init__(self) -> None:
        self.place = ""
        self.num_left = 0
        self.asked = "4.00 MiB"

    def arm(self, place: str, *, times: int = 1) -> None:
        self.place, self.num_left = place, times

    def passes(self, place: str = "") -> None:
        if place == self.place and self.num_left:
            self.num_left -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.asked}. GPU 0 has no more")


class Block(nn.Module):
    """Random numbers, statistics that a forward changes, and more activations than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 64))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.norm(self.inner(values))


class Model(nn.Module):
    """Blocks with dropout and batch statistics; `before` is called with the model before them, as part of a forward."""

    def __init__(self, before: Callable[["Model", Tensor], Tensor] = lambda _, values: values) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.bomb, self._before = nn.Linear(64, 1), Bomb(), before
        self.count, self.seen, self.mean = 0, [], 0.0
        self.log: dict[str, dict[str, list[int]]] = {"of": {"blocks": []}}
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("table", torch.randn(1 << 17))
        self.register_buffer("large", torch.zeros(1 << 19))

    def forward(self, values: Tensor) -> Tensor:
        values = self._before(self, values)
        for block in self.blocks:
            values = block(values)
        self.bomb.passes()
        return self.head(values)


def everything(model: Model, values: Tensor) -> Tensor:
    """Draws from four generators, counts, collects, keeps a mean, and writes into a buffer."""
    model.count += 1
    model.seen.append(model.count)
    model.log["of"]["blocks"].append(model.count)
    model.log["of"].setdefault(f"step {model.count}", []).append(0)
    model.mean = 0.9 * model.mean + 0.1 * float(values.detach().mean())
    model.total.add_(1.0)
    noise = torch.randn(64, generator=model.generator)
    return values * (1.0 + random.random() + float(np.random.rand())) + noise * model.mean * model.count


def made(before: Callable[[Model, Tensor], Tensor] = lambda _, values: values) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model(before)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: Model, optimizer: torch.optim.Optimizer, fails: tuple[int, ...] = (), session: Session | None = None
) -> str:
    """Trains in a plain loop, or by a session's `compute_gradients`; returns the digest of all that came of it."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    for step in range(NUM_STEPS):
        model.bomb.num_left = fails.count(step)
        batch = torch.randn(SAMPLES, 64)
        if session is None:
            model(batch).square().mean().backward()
        else:
            session.compute_gradients(batch, lambda rows: model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in (*model.parameters(), *model.buffers(), model.generator.get_state()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(repr((random.random(), np.random.rand(), model.count, model.seen, model.log, model.mean)).encode())
    return found.hexdigest()
