"""Small models of blocks, a loop that trains them, and actions for plans by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.blocks.executor import BlockExecutor, BlockLayer, OffloadEngine, resolve_blocks
from memwall.apply.techniques.offload import OffloadLayer
from memwall.apply.techniques.recompute import RecomputeLayer
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

WIDTH = 64
Call = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A layer with something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


class Model(nn.Module):
    """Blocks, called by `call`."""

    def __init__(self, call: Call = lambda block, x: block(x), num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def train(session: Session, model: nn.Module, num_steps: int = 3, batch: Tensor | None = None) -> None:
    """A plain loop."""
    optimizer = torch.optim.AdamW(model.parameters())
    session.attach(model, optimizer)
    for _ in range(num_steps):
        model(torch.ones(8, WIDTH) if batch is None else batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def offload(path: str, **settings: Any) -> Offload:
    """Moves whatever is worth a kilobyte."""
    return Offload(block=path, scope="saved", tier="disk", min_bytes=1024, window_bytes=8 << 20, **settings)


def executor_of(
    model: nn.Module,
    *actions: Recompute | Offload,
    order: Sequence[str] = (),
    engine: OffloadEngine | None = None,
) -> BlockExecutor:
    """What wraps a model's blocks as these actions have it; `apply` is still to be called."""
    executor = BlockExecutor(resolve_blocks([model], [""]), order)
    for action in actions:
        executor.add(action.block, _layer(action, engine))
    return executor


def _layer(action: Recompute | Offload, engine: OffloadEngine | None) -> BlockLayer:
    if isinstance(action, Recompute):
        return RecomputeLayer(action)
    assert engine is not None
    return OffloadLayer(engine, action.form)


PLACED = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=1 << 20, min_bytes=1024)
"""All of the optimizer's state that is worth a kilobyte."""
