"""Tables of rows and torch's own beside them, for the tests of `memwall.rows.embedding`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memwall.rows.embedding import RowEmbedding

__all__ = ["DIM", "NUM_ROWS", "OPTIMIZERS", "Twins", "assert_same_rows", "ids_of", "loss_of", "opened", "twins_of"]

NUM_ROWS, DIM = 6000, 16
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.25),
}
Twins = tuple[Any, Any]


@contextmanager
def opened(folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes tables whose cache holds a fraction of their rows, and closes them."""
    made: list[Any] = []

    def table(kind: Any = RowEmbedding, **settings: Any) -> Any:
        made.append(kind(NUM_ROWS, DIM, **({"cache": "256KiB", "disk": folder, "seed": 7} | settings)))
        return made[-1]

    yield table
    for module in made:
        module.close()


def twins_of(make: Callable[..., Any]) -> Callable[..., Twins]:
    """Makes a table, and torch's own with the same weights."""

    def both(kind: Any = RowEmbedding, dtype: torch.dtype = torch.float32, **settings: Any) -> Twins:
        ours = make(kind, dtype=dtype, **settings)
        torchs = nn.Embedding if kind is RowEmbedding else nn.EmbeddingBag
        theirs = torchs(NUM_ROWS, DIM, sparse=settings.get("mode") != "max", dtype=dtype, **settings)
        theirs.load_state_dict({"weight": ours.rows(torch.arange(NUM_ROWS))})
        return ours, theirs

    return both


def ids_of(step: int, *shape: int) -> Tensor:
    """Skewed ids with many repetitions."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(*shape, generator=generator) ** 4 * NUM_ROWS).long()


def loss_of(module: nn.Module, step: int) -> Tensor:
    """A loss whose gradient differs in every element."""
    out: Tensor = module(ids_of(step, 40, 20))
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(~step)).to(out)).sum()


def assert_same_rows(ours: Any, theirs: Any) -> None:
    """All rows, to the bit."""
    assert torch.equal(ours.rows(torch.arange(NUM_ROWS)), theirs.weight.detach())
