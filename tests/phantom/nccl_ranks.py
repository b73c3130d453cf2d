"""Ranks on the phantom device: forks of a test, each a process with a device of its own, that meet through a file."""

import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["on_ranks", "trained"]

LIMIT_SECONDS = 60


def _rank(rank: int, num_ranks: int, backend: str, meet: str, work: Callable[[], Any], said: Connection) -> None:
    distributed.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=num_ranks)
    try:
        said.send((True, work()))
        distributed.destroy_process_group()
    except Exception:
        said.send((False, traceback.format_exc()))
    sys.stdout.flush()


def on_ranks(num_ranks: int, work: Callable[[], Any], backend: str = "nccl") -> list[Any]:
    """Returns what a function returns on each rank; "ended" for a rank that did not return, and words of its error."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "ranks")
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, backend, meet, work, pipes[rank][1]))
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        for _, writing in pipes:
            writing.close()
        found: list[Any] = []
        for reading, _ in pipes:
            try:
                is_done, value = reading.recv() if reading.poll(LIMIT_SECONDS) else (True, "late")
                found.append(value if is_done else f"error: {value}")
            except EOFError:
                found.append("ended")
        for each in ranks:
            each.join(2)
            each.kill()
            each.join()
    return found


def trained(wrapper: str, num_steps: int = 3) -> list[list[float]]:
    """Returns the weights, as far as this rank holds them, of a model trained on what each rank has of its own."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.LayerNorm(24)).cuda()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.children():
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    for _ in range(num_steps):
        model(torch.randn(8, 24, generator=generator).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [getattr(each, "_local_tensor", each.data) for each in model.parameters()]
    return [each.cpu().view(-1).tolist() for each in local]
