"""Engines that offload almost everything of a tiny model, for the tests of what they keep and bring back."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.offload.engine import ActivationOffload
from memwall.predict.process import TENSOR_HEAP
from memwall.store.backend import SystemBackend
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10


class Pool(TransferPool):
    """Small blocks, so that tiny tensors take several; and who allocates those tensors."""

    def __init__(self, scratch: ScratchFile, allocator: AllocatorHandler) -> None:
        super().__init__(scratch, block_bytes=8 * KIB)
        self.allocator = allocator


@contextmanager
def a_pool(
    directory: Path, policy: str, monkeypatch: pytest.MonkeyPatch, backend: SystemBackend | None = None
) -> Iterator[Pool]:
    """A pool on a disk, while tensors come from malloc, or lie on whole pages in a heap of their own."""
    allocator = AllocatorHandler()
    if policy == TENSOR_HEAP:
        monkeypatch.setattr("memwall.apply.memory.allocator.MIN_TENSOR_BYTES", KIB)
        allocator.apply(TENSOR_HEAP)
    try:
        with Pool(ScratchFile(directory, backend=backend), allocator) as made:
            yield made
    finally:
        allocator.undo()


class Tiny(nn.Module):
    """Two blocks with what makes saved tensors awkward: query, key and value in one matrix, an expanded mask, an
    in-place activation, dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32), nn.Dropout(0.1)
            )
            for _ in range(2)
        )
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(40, 40).tril().log())

    def block(self, index: int, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv[index](x).chunk(3, dim=-1))
        mask = self.mask.to(x.dtype).expand(x.shape[0], 4, 40, 40)
        mixed = ((q @ k.transpose(-1, -2)) / 3 + mask).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2)
        out: Tensor = x + self.mlp[index](x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(2):
            x = self.block(index, x)
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


class GradientIsSaved(torch.autograd.Function):
    """As losses do whose forward has the gradient already: what it returns autograd may keep as `.grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (weight.detach() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def tokens() -> Tensor:
    """[batch 6, length 40]"""
    return torch.randint(50, (6, 40), generator=torch.Generator().manual_seed(3))


def shares_with(module: nn.Module) -> Callable[[Tensor], bool]:
    """True for what lives in a parameter's or buffer's storage."""
    held = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    return lambda tensor: tensor.untyped_storage().data_ptr() in held


def offload_for(pool: Pool, module: nn.Module | None = None, **settings: int) -> ActivationOffload:
    """An engine that moves almost everything through a window smaller than the largest tensor."""
    excluded = shares_with(module) if module is not None else (lambda tensor: False)
    sizes = {"window_bytes": 32 * KIB, "min_bytes": 1024} | settings
    return ActivationOffload(pool, is_excluded=excluded, owns_pages=pool.allocator.owns_pages, **sizes)


def loaded_bytes(offload: ActivationOffload) -> int:
    """Returns the bytes brought back that no backward node has taken yet; of packed ones what they unpack to."""
    offload._reap()
    return offload._loads.num_bytes


def held_bytes(offload: ActivationOffload) -> int:
    """Returns the bytes that are parked for a graph that still lives, as they left."""
    offload._reap()
    return sum(entry.parked.num_bytes for entry in offload._entries)


def is_empty(offload: ActivationOffload, pool: TransferPool) -> bool:
    """Nothing is held in memory or on disk."""
    gc.collect()
    if offload.num_held or loaded_bytes(offload):
        return False
    pool.wait_for(lambda: pool.scratch.used_bytes == 0)
    return True
