"""Blocks whose forward reads or changes Python state."""

import collections
import itertools
import random
import time

import numpy as np
import torch
from torch import Tensor

from scenarios.corpus import Mlp, Net, Script, scenario, supervised

_calls = [0]


def _net(kind: type[Mlp]) -> Script:
    return supervised(Net(kind(), kind()))


@scenario()
def python_random() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            return y * random.gauss(1, 0.5)

    return _net(Block)


@scenario()
def numpy_random() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            return y * float(np.random.randn())

    return _net(Block)


@scenario()
def own_torch_generator() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def between(self, y: Tensor) -> Tensor:
            return y * torch.rand(y.shape, generator=self.generator)

    return _net(Block)


@scenario()
def own_python_and_numpy_generators() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.python, self.numpy = random.Random(1), np.random.default_rng(2)

        def between(self, y: Tensor) -> Tensor:
            return y * self.python.random() + float(self.numpy.normal())

    return _net(Block)


@scenario()
def counts_its_calls() -> Script:
    class Block(Mlp):
        calls = 0

        def between(self, y: Tensor) -> Tensor:
            self.calls += 1
            return y / self.calls

    return _net(Block)


@scenario()
def alternates_between_branches() -> Script:
    class Block(Mlp):
        is_odd = False

        def between(self, y: Tensor) -> Tensor:
            self.is_odd = not self.is_odd
            return y.relu() if self.is_odd else y.sin() * y

    return _net(Block)


@scenario()
def keeps_a_running_mean_in_an_attribute() -> Script:
    class Block(Mlp):
        mean: Tensor | None = None

        def between(self, y: Tensor) -> Tensor:
            now = y.detach().mean(0)
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
            return y - self.mean

    return _net(Block)


@scenario()
def writes_a_running_mean_in_place() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(64)

        def between(self, y: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return y - self.mean.clone()

    return _net(Block)


@scenario()
def writes_a_buffer() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(64))

        def between(self, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
            return y - self.mean.clone()

    return _net(Block)


@scenario()
def drops_layers_by_python_random() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() < 0.5 else super().forward(x)

    return _net(Block)


@scenario()
def drops_layers_by_torch_random() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand(()) < 0.5 else super().forward(x)

    return _net(Block)


@scenario()
def drops_layers_outside_of_the_block() -> Script:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if random.random() < 0.6:
                    x = block(x)
            out: Tensor = self.head(x)
            return out

    return supervised(Dropping(Mlp(), Mlp()))


@scenario()
def remembers_its_last_output() -> Script:
    class Block(Mlp):
        last: Tensor | None = None

        def between(self, y: Tensor) -> Tensor:
            out = y if self.last is None else y + 0.1 * self.last
            self.last = y.detach()
            return out

    return _net(Block)


@scenario()
def appends_to_a_list() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def between(self, y: Tensor) -> Tensor:
            self.seen.append(float(y.detach().abs().mean()))
            return y / (1 + sum(self.seen))

    return _net(Block)


@scenario()
def fills_a_queue() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.queue: collections.deque[Tensor] = collections.deque(maxlen=2)

        def between(self, y: Tensor) -> Tensor:
            self.queue.append(y.detach())
            return y + torch.stack(list(self.queue)).mean(0)

    return _net(Block)


@scenario()
def counts_with_an_iterator() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.counter = itertools.count(1)

        def between(self, y: Tensor) -> Tensor:
            return y / next(self.counter)

    return _net(Block)


@scenario()
def reads_a_global_that_forward_does_not_change() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            return y / (1 + _calls[0])

    def count(number: int) -> None:
        _calls[0] = number

    count(0)
    return supervised(Net(Block(), Block()), after_step=count)


@scenario()
def measures_time_without_using_it() -> Script:
    class Block(Mlp):
        seconds = 0.0

        def between(self, y: Tensor) -> Tensor:
            begin = time.perf_counter()
            out = y.sin()
            self.seconds += time.perf_counter() - begin
            return out

    return _net(Block)


@scenario()
def changes_the_state_of_another_module() -> Script:
    class Block(Mlp):
        def __init__(self, other: list[Tensor]) -> None:
            super().__init__()
            self.shared = other

        def between(self, y: Tensor) -> Tensor:
            self.shared[0] = self.shared[0] * 0.5 + y.detach().mean()
            return y + self.shared[0]

    shared = [torch.zeros(())]
    return supervised(Net(Block(shared), Block(shared)))


@scenario()
def sets_an_attribute_for_the_loss() -> Script:
    """As mixture-of-experts layers do with their balancing loss."""

    class Block(Mlp):
        auxiliary: Tensor

        def between(self, y: Tensor) -> Tensor:
            self.auxiliary = y.pow(2).mean()
            return y

    class WithAuxiliary(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out + sum(block.auxiliary for block in self.blocks)  # type: ignore[union-attr,misc]

    return supervised(WithAuxiliary(Block(), Block()))


class _Meter:
    """As loops have them, for a mean."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]

    def add(self, value: float) -> None:
        self.total += value
        self.values.append(value)


@scenario()
def updates_an_object_of_its_own() -> Script:
    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.meter = _Meter()

        def between(self, y: Tensor) -> Tensor:
            self.meter.add(float(y.detach().abs().mean()))
            return y / (1 + self.meter.total) + len(self.meter.values)

    return _net(Block)


@scenario()
def shares_an_object_that_holds_a_module() -> Script:
    class Context:
        def __init__(self, model: list[Net]) -> None:
            self.model, self.calls = model, 0

    class Block(Mlp):
        def __init__(self, context: Context) -> None:
            super().__init__()
            self.context = context

        def between(self, y: Tensor) -> Tensor:
            self.context.calls += 1
            return y / self.context.calls + self.context.model[0].head.bias.sum()

    models: list[Net] = []
    context = Context(models)
    models.append(Net(Block(context), Block(context)))
    return supervised(models[0])


_losses: list[Tensor] = []
_count = 0


@scenario()
def appends_to_a_global_list() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            _losses.append(y.pow(2).mean())
            return y

    class WithLosses(Net):
        def forward(self, x: Tensor) -> Tensor:
            _losses.clear()
            out = super().forward(x)
            return out + sum(_losses, torch.zeros(()))

    return supervised(WithLosses(Block(), Block()))


@scenario()
def counts_in_a_global() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            global _count
            _count += 1
            return y / _count

    globals()["_count"] = 0
    return supervised(Net(Block(), Block()))


_sum: Tensor | None = None


@scenario()
def sums_losses_in_a_global() -> Script:
    class Block(Mlp):
        def between(self, y: Tensor) -> Tensor:
            global _sum
            _sum = y.pow(2).mean() if _sum is None else _sum + y.pow(2).mean()
            return y

    class WithSum(Net):
        def forward(self, x: Tensor) -> Tensor:
            global _sum
            _sum = None
            out = super().forward(x)
            assert _sum is not None
            return out + _sum

    return supervised(WithSum(Block(), Block()))


@scenario()
def is_called_with_a_tensor_of_inference_mode() -> Script:
    class Block(Mlp):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x) + (0 if mask is None else 1)

    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                mask = torch.ones(len(x))
            for block in self.blocks:
                x = block(x, mask)
            out: Tensor = self.head(x)
            return out

    return supervised(Masked(Block(), Block()))
