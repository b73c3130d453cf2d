"""The arms of `knobs.py`, and the worker process that trains under one of them.

A worker answers one JSON object per line on its standard output: first about itself, then one per request read from its
standard input. It computes only while it has a request, so that a coordinator can interleave many workers.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from knob_report import HEAP
from memwall_arm import memwall_arm, tensor_heap
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import WORKLOADS, Workload

NUM_THREADS = 2
DISK_THRESHOLD_ELEMENTS = 1000
"""Smaller tensors stay in memory, as in PyTorch's tutorial on saved-tensor hooks."""


def knob_arms(workload: Workload) -> list[str]:
    """Returns the knobs a user can set by hand; the two plain arms are the same, for the noise floor."""
    num_blocks = len(workload.blocks(workload.build()))
    every_n = sorted({1, 2, 3, 4, num_blocks // 2})
    return ["plain", "plain-again", *(f"checkpoint-every-{n}" for n in every_n), "save-to-disk"]


def heap_arms(knobs: list[str]) -> list[str]:
    """The knobs again, with memwall's heap for tensors and no plan: they tell the allocator's share of a gain."""
    return [knob + HEAP for knob in knobs if knob not in ("plain-again", "save-to-disk")]


def checkpoint_every(blocks: list[nn.Module], every_n: int) -> None:
    """Recomputes block 0, n, 2n, ... in backward, with `torch.utils.checkpoint`."""
    for block in blocks[::every_n]:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


class _SelfDeletingFile:
    def __init__(self, folder: str) -> None:
        self.name = os.path.join(folder, uuid.uuid4().hex)

    def __del__(self) -> None:
        os.remove(self.name)


@contextmanager
def save_to_disk(moved: dict[str, int]) -> Iterator[None]:
    """Every saved tensor goes to a file and back: the hooks of PyTorch's tutorial, nothing more."""

    def pack(tensor: torch.Tensor) -> object:
        if tensor.numel() < DISK_THRESHOLD_ELEMENTS:
            return tensor
        file = _SelfDeletingFile(folder)
        torch.save(tensor, file.name)
        moved["bytes_moved"] += os.path.getsize(file.name)
        return file

    def unpack(packed: object) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert isinstance(packed, _SelfDeletingFile)
        moved["bytes_moved"] += os.path.getsize(packed.name)
        tensor: torch.Tensor = torch.load(packed.name)
        return tensor

    with tempfile.TemporaryDirectory() as folder, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def read_peak_bytes() -> int:
    """Returns the process's resident high-water mark (VmHWM) since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def reset_peak() -> None:
    """Sets the high-water mark to what is resident now (proc(5), clear_refs 5)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _hash(tensors: Iterator[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def work(workload_name: str, arm: str, budget_bytes: int | None) -> None:
    """Trains one workload under one arm on request, until standard input closes or asks to finish."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies
    torch.set_num_threads(NUM_THREADS)
    workload = WORKLOADS[workload_name]
    model = workload.build()
    optimizer = workload.optimizer(model)
    moved = {"bytes_moved": 0}
    losses: list[float] = []
    reset_peak()
    with ExitStack() as stack:
        facts: Callable[[], Mapping[str, object]] = moved.copy
        if arm.endswith(HEAP):
            stack.enter_context(tensor_heap())
            arm = arm.removesuffix(HEAP)
        if arm.startswith("checkpoint-every-"):
            checkpoint_every(workload.blocks(model), int(arm.rsplit("-", 1)[1]))
        elif arm == "save-to-disk":
            stack.enter_context(save_to_disk(moved))
        elif arm.startswith("memwall"):
            assert budget_bytes is not None
            facts = stack.enter_context(memwall_arm(model, optimizer, budget_bytes))
        json.dump({"built_peak_bytes": read_peak_bytes()}, replies)
        replies.write("\n")
        peak_bytes = 0
        for line in sys.stdin:
            if line.strip() != "step":
                break
            batch = workload.batch(len(losses))
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - start
            losses.append(loss.item())
            del loss, batch
            peak_bytes = max(peak_bytes, read_peak_bytes())  # memwall sets the mark back after each step it measured
            json.dump({"step_seconds": seconds, "peak_bytes": peak_bytes}, replies)
            replies.write("\n")
        found = dict(facts())
        record = {
            "peak_bytes": max(peak_bytes, int(found.get("overall_peak_bytes", 0))),  # type: ignore[call-overload]
            "losses": losses,
            "weights_sha256": _hash(iter(model.parameters())),
            "buffers_sha256": _hash(iter(model.buffers())),
            **found,
        }
    json.dump(record, replies)
    replies.write("\n")
    replies.close()
