"""Blocks whose forward reads and changes more than tensors, and how they are trained and recomputed."""

import collections
import itertools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from block_models import executor_of
from torch import Tensor, nn

from memwall.apply.blocks.executor import BlockExecutor
from memwall.planning.techniques.recompute import Recompute


class Block(nn.Module):
    """Two layers; what happens between them is up to the class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.num_forwards = [0]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.between(torch.sin(self.up(x)))))

    def between(self, y: Tensor) -> Tensor:
        return y


class Calls(list[Any]):
    """Counts what runs: a plain list is put back as it was before a second run, which a test could not see then."""


class PythonRandom(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * random.gauss(0, 1)


class NumpyRandom(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * float(np.random.rand())


class NumpyNormal(Block):
    """numpy's legacy generator makes normal numbers in pairs, and holds the second one back."""

    def between(self, y: Tensor) -> Tensor:
        return y * float(np.random.randn())


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, y: Tensor) -> Tensor:
        return y * torch.rand(y.shape, generator=self.generator)


class OwnPythonGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def between(self, y: Tensor) -> Tensor:
        return y * self.generator.random()


class OwnNumpyGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def between(self, y: Tensor) -> Tensor:
        return y * float(self.generator.random())


class Counting(Block):
    num_calls = 0

    def between(self, y: Tensor) -> Tensor:
        self.num_calls += 1
        return y * self.num_calls


class ReboundMean(Block):
    mean: Any = 0.0

    def between(self, y: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.mean


class MeanInPlace(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(24)

    def between(self, y: Tensor) -> Tensor:
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


class MeanInADict(MeanInPlace):
    def __init__(self) -> None:
        super().__init__()
        self.means = {"of": self.mean}
        del self.mean

    def between(self, y: Tensor) -> Tensor:
        self.means["of"].lerp_(y.detach().mean(0), 0.1)
        return y - self.means["of"].clone()


class BufferInPlace(MeanInPlace):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(24))


class LossesAppended(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.seen: collections.deque[float] = collections.deque(maxlen=3)

    def between(self, y: Tensor) -> Tensor:
        self.losses.append(y.square().mean())
        self.seen.append(float(y.detach().mean()))
        return y * len(self.losses)


class LayerDrop(Block):
    def between(self, y: Tensor) -> Tensor:
        return y if random.random() < 0.5 else torch.tanh(y) * torch.exp(-y)


class Alternating(Block):
    is_odd = False

    def between(self, y: Tensor) -> Tensor:
        self.is_odd = not self.is_odd
        return torch.tanh(y) * y if self.is_odd else y


GENERATOR, GENERATORS = np.random.default_rng(5), {"of torch": torch.Generator(), "of Python": random.Random()}
NUM_DRAWN = 0


def drawn() -> float:
    """A helper that forwards call, with state of its own."""
    global NUM_DRAWN
    NUM_DRAWN += 1
    return NUM_DRAWN * float(GENERATOR.random())


class GlobalGenerators(Block):
    def between(self, y: Tensor) -> Tensor:
        scale = torch.rand(1, generator=GENERATORS["of torch"]) * GENERATORS["of Python"].random()
        return y * scale * float(GENERATOR.random())


class HelperDraws(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * drawn()


def _defined_inside() -> type[Block]:
    generator, num_calls = torch.Generator(), 0

    class EnclosedGenerator(Block):
        def between(self, y: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return y * torch.rand(1, generator=generator) * num_calls

        @staticmethod
        def seed() -> None:
            nonlocal num_calls
            generator.manual_seed(7)
            num_calls = 0

    return EnclosedGenerator


EnclosedGenerator = _defined_inside()


def seed_outside() -> None:
    """Puts back what lies outside of these blocks."""
    global NUM_DRAWN
    NUM_DRAWN = 0
    GENERATOR.bit_generator.state = np.random.default_rng(5).bit_generator.state
    GENERATORS["of torch"].manual_seed(6)
    GENERATORS["of Python"].seed(6)
    EnclosedGenerator.seed()


CLOCK = itertools.count(1)


class ReadsAGlobal(Block):
    def between(self, y: Tensor) -> Tensor:
        return y * next(CLOCK)


def trained(model: nn.Module, *, num_steps: int = 3, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """Losses, gradients and what random numbers come next, of some steps from the same random states."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    with around or nullcontext():
        for number in range(num_steps):
            batch = torch.linspace(-1, 1, 30).reshape(5, 6) * (number + 1)
            loss = model(batch).square().sum()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, torch.rand(3), torch.tensor([random.random(), np.random.rand()])]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@contextmanager
def under(model: nn.Module, *actions: Recompute) -> Iterator[BlockExecutor]:
    executor = executor_of(model, *actions)
    executor.apply()
    try:
        yield executor
    finally:
        executor.undo()
