"""A small model trained with any optimizer that may be stepped in parts; whether two runs ended with the same bits."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lion_pytorch import Lion
from lion_pytorch.foreach import Lion as ForeachLion
from torch import Tensor, nn

from memwall.trace.optimizers import STEPPED_ALONE

__all__ = [
    "OPTIMIZERS",
    "Keep",
    "Make",
    "Net",
    "are_equal",
    "digest_of_training",
    "in_groups",
    "resident_state_bytes",
    "same",
    "train",
    "train_step",
]

KIB = 1 << 10
WIDTH = 64

Make = Callable[[Any], torch.optim.Optimizer]
Keep = Callable[[torch.optim.Optimizer], object]

OPTIMIZERS: dict[str, Make] = {
    "adamw for-loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adam amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam foreach maximize": partial(torch.optim.Adam, lr=1e-3, foreach=True, maximize=True),
    "sgd for-loop": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
    "sgd foreach nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True, nesterov=True),
    "sgd fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop centered": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "lion decoupled": partial(Lion, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "lion foreach": partial(ForeachLion, lr=1e-3, weight_decay=0.1),
    **{name: getattr(torch.optim, name) for name in sorted(STEPPED_ALONE - {"Lion", "Muon", "SparseAdam"})},
    "Lion": Lion,
}


class Net(nn.Module):
    """A few matrices of different sizes; the last one is used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 16)
        self.rare = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.norm(self.first(x))
        for layer in self.middle:
            x = x + layer(x).tanh()
        out: Tensor = self.last(x)
        return out + self.rare(x) if step % 2 == 0 else out


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, with settings of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two micro-batches, clipping, the update."""
    for micro in range(2):
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(100 * step + micro))
        (model(x, step).square().mean() / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def train(make: Make, keep: Keep | None = None, *, begin: int = 0, num_steps: int = 6) -> tuple[nn.Module, Any]:
    """The trained model and the optimizer's state dict. From step `begin` on the state is where `keep` puts it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(num_steps):
        if keep is not None and step == begin:
            keep(optimizer)
        train_step(model, optimizer, step)
        scheduler.step()
    return model, optimizer.state_dict()


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def are_equal(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> bool:
    return same(dict(one[0].named_parameters()), dict(other[0].named_parameters())) and same(one[1], other[1])


def resident_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Large tensors of the state that are in memory."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(t.nbytes for t in tensors if not t.is_meta and t.nbytes >= KIB)


def digest_of_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of weights and state, wherever they are."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    for _, tensors in sorted(optimizer.state_dict()["state"].items()):
        for _, value in sorted(tensors.items()):
            found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()
