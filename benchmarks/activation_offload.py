"""The claim: saved tensors go to disk and come back at the disk's own speed, or behind the computation.

    python benchmarks/activation_offload.py [--steps 12] [--disk DIR]
    python benchmarks/activation_offload.py --quick          # few layers and steps; nothing is written

Two chains of operations that save large tensors, forward and backward: one that computes next to nothing, so that the
disk binds, and one of matrix products that take longer than the disk. Plain steps and steps whose saved tensors are on
disk alternate in one process, and before each of the latter the disk is written and read with O_DIRECT without memwall
(`raw_disk.py`). Of the disk's time for the bytes that the kernel counted (/proc/self/io):

- where it binds, the share that it is of the step: 100 % is a disk that never waits;
- where it does not, the share that the step does not show: 1 - (step - plain step) / disk's time.

Gradients of all steps are the same bits. Writes results/cpu/activation_offload.json.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance
from raw_disk import RawDisk, io_bytes
from torch import Tensor

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.parking import open_engine
from memwall.plan.orders import MIN_MOVED_BYTES, WINDOW_BYTES
from memwall.predict.process import TENSOR_HEAP

OUTPUT = Path(__file__).parent / "results" / "cpu" / "activation_offload.json"
GOALS = {"disk binds": 0.85, "computation binds": 0.9}
_COLUMNS = 1024


def copying(num_layers: int) -> tuple[Callable[[Tensor], Tensor], int]:
    """Saves a tensor of 16 MiB in each layer, and does no more than read and write it; and how many rows that takes."""

    def run(x: Tensor) -> Tensor:
        for _ in range(num_layers):
            x = torch.relu(x)
        return x

    return run, 4096


def multiplying(num_layers: int) -> tuple[Callable[[Tensor], Tensor], int]:
    """Saves a tensor of 4 MiB in each layer, after a product of a thousand rows and columns; and its rows."""
    weight = torch.randn(_COLUMNS, _COLUMNS, generator=torch.Generator().manual_seed(1)) / _COLUMNS**0.5

    def run(x: Tensor) -> Tensor:
        for _ in range(num_layers):
            x = torch.tanh(x @ weight)  # which needs no gradient, so that only what tanh gives is saved
        return x

    return run, 1024


def measure(make: Callable[[int], Any], num_layers: int, num_steps: int, directory: str) -> dict[str, Any]:
    """Alternating steps of one chain."""
    chain, num_rows = make(num_layers)
    x = torch.randn(num_rows, _COLUMNS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    disk = RawDisk(directory)
    engine, close = open_engine(
        [], disk=directory, capacity_bytes=None, window_bytes=WINDOW_BYTES, min_bytes=MIN_MOVED_BYTES
    )
    rows, plain_seconds, digests = [], [], set()
    allocator = AllocatorHandler()
    allocator.apply(TENSOR_HEAP)  # as under every plan: malloc would fault in all pages of each tensor again
    try:
        for number in range(2 * (num_steps + 1)):
            is_plain = number % 2 == 0
            write, read = (0.0, 0.0) if is_plain else disk.seconds_per_byte()
            moved, begin = io_bytes(), time.perf_counter()
            with nullcontext() if is_plain else engine.hooks():
                out = chain(x)
            out.sum().backward()
            seconds = time.perf_counter() - begin
            read_bytes, written_bytes = (now - then for now, then in zip(io_bytes(), moved, strict=True))
            assert x.grad is not None
            digests.add(hashlib.sha256(x.grad.numpy().data).hexdigest())
            x.grad = None
            if number < 2:  # pages and files are new
                continue
            if is_plain:
                plain_seconds.append(seconds)
            else:
                bytes_moved = {"read_bytes": read_bytes, "written_bytes": written_bytes}
                disk_seconds = read_bytes * read + written_bytes * write
                rows.append({"seconds": seconds, "disk_seconds": disk_seconds, **bytes_moved})
    finally:
        close()
        allocator.undo()
    plain = statistics.median(plain_seconds)
    binding = [row["disk_seconds"] / row["seconds"] for row in rows]
    hidden = [1 - max(0.0, row["seconds"] - plain) / row["disk_seconds"] for row in rows]
    return {
        "plain_seconds": quartiles(plain_seconds),
        "offloaded_seconds": quartiles([row["seconds"] for row in rows]),
        "disk_seconds": quartiles([row["disk_seconds"] for row in rows]),
        "written_bytes": statistics.median(row["written_bytes"] for row in rows),
        "read_bytes": statistics.median(row["read_bytes"] for row in rows),
        "share_of_disk_speed": quartiles(binding),
        "share_hidden": quartiles(hidden),
        "has_same_gradients": len(digests) == 1,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="saved tensors on disk, beside a plain step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="few layers and steps; nothing is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_layers, num_steps = (8, 2) if options.quick else (48, options.steps)
    cells = []
    for name, make in {"disk binds": copying, "computation binds": multiplying}.items():
        cell = {"case": name, **measure(make, num_layers, num_steps, options.disk)}
        share = cell["share_of_disk_speed" if name == "disk binds" else "share_hidden"]
        cell["holds"] = cell["has_same_gradients"] and share[1] >= GOALS[name]
        cells.append(cell)
        print(
            f"{name}: step {cell['plain_seconds'][1]:.3f} -> {cell['offloaded_seconds'][1]:.3f} s, disk "
            f"{cell['disk_seconds'][1]:.3f} s for {cell['written_bytes'] / 2**20:,.0f} MiB out and "
            f"{cell['read_bytes'] / 2**20:,.0f} MiB in; {'of its speed' if name == 'disk binds' else 'hidden'} "
            f"{share[1]:.0%} ({share[0]:.0%}-{share[2]:.0%}), goal {GOALS[name]:.0%}; "
            f"same gradients: {'yes' if cell['has_same_gradients'] else 'NO'}"
        )
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.activation-offload/1", "num_layers": num_layers}
        OUTPUT.write_text(json.dumps({**facts, "num_steps": num_steps, "cells": cells}, indent=1) + "\n")
    return 0 if all(cell["holds"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
