"""The claim: saved tensors go to disk and come back at the disk's own speed, or behind the computation.

    python benchmarks/activation_offload.py [--steps 30] [--disk DIR]
    python benchmarks/activation_offload.py --quick          # few layers and steps; nothing is written

Chains of operations that save large tensors, forward and backward: one that computes next to nothing, so that the disk
binds, and one of matrix products that take longer than the disk, with tensors of 16 and of 4 MiB. Plain steps and
steps whose saved tensors are on disk alternate in one process, and before and after each of the latter the disk is
written and read with O_DIRECT without memwall, from as much memory as the window has (`raw_disk.py`). Of the disk's
time for the bytes that the kernel counted (/proc/self/io):

- where it binds, the share that it is of the step: 100 % is a disk that never waits;
- where it does not, the share that the step does not show: 1 - (step - plain step) / disk's time.

Gradients of all steps are the same bits. Writes results/cpu/activation_offload.json.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance
from raw_disk import RawDisk, io_bytes
from torch import nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.offload.parking import open_engine
from memwall.planning.menu import MIN_MOVED_BYTES, WINDOW_BYTES
from memwall.predict.process import TENSOR_HEAP

OUTPUT = Path(__file__).parent / "results" / "cpu" / "activation_offload.json"
_COLUMNS = 1024


@dataclass(frozen=True)
class Case:
    """A chain of layers, each of which saves a tensor of `num_rows` rows of 4 KiB; and the share that is the goal."""

    name: str
    num_rows: int
    num_layers: int
    multiplies: bool
    goal: float

    def chain(self) -> nn.Sequential:
        """Layers that save what they give: a frozen product before it saves nothing but its weight, which stays."""
        product = nn.Linear(_COLUMNS, _COLUMNS, bias=False).requires_grad_(False)
        layers = (product, nn.Tanh()) if self.multiplies else (nn.ReLU(),)
        return nn.Sequential(*layers * self.num_layers)


CASES = (
    Case("disk binds", 4096, 48, multiplies=False, goal=0.85),
    Case("computation binds", 4096, 24, multiplies=True, goal=0.9),
    Case("computation binds, small tensors", 1024, 48, multiplies=True, goal=0.9),
)


def measure(case: Case, num_steps: int, directory: str) -> dict[str, Any]:
    """Alternating steps of one chain."""
    torch.manual_seed(1)
    chain = case.chain()
    x = torch.randn(case.num_rows, _COLUMNS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    disk = RawDisk(directory, WINDOW_BYTES)
    allocator = AllocatorHandler()
    engine, close = open_engine(
        [chain],
        disk=directory,
        capacity_bytes=None,
        window_bytes=WINDOW_BYTES,
        min_bytes=MIN_MOVED_BYTES,
        owns_pages=allocator.owns_pages,
    )
    rows, plain_seconds, digests = [], [], set()
    allocator.apply(TENSOR_HEAP)  # as under every plan: malloc would fault in all pages of each tensor again
    try:
        for number in range(2 * (num_steps + 1)):
            is_plain = number % 2 == 0
            before = None if is_plain else disk.seconds_per_byte()
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
            if before is None:
                plain_seconds.append(seconds)
            else:
                write, read = (statistics.mean(pair) for pair in zip(before, disk.seconds_per_byte(), strict=True))
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="few layers and steps; nothing is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_steps = 2 if options.quick else options.steps
    cells = []
    for case in CASES:
        used = dataclasses.replace(case, num_layers=8) if options.quick else case
        is_bound = not case.multiplies
        cell = {**dataclasses.asdict(used), **measure(used, num_steps, options.disk)}
        share = cell["share_of_disk_speed" if is_bound else "share_hidden"]
        cell["holds"] = cell["has_same_gradients"] and share[1] >= case.goal
        cells.append(cell)
        print(
            f"{case.name}: step {cell['plain_seconds'][1]:.3f} -> {cell['offloaded_seconds'][1]:.3f} s, disk "
            f"{cell['disk_seconds'][1]:.3f} s for {cell['written_bytes'] / 2**20:,.0f} MiB out and "
            f"{cell['read_bytes'] / 2**20:,.0f} MiB in; {'of its speed' if is_bound else 'hidden'} "
            f"{share[1]:.0%} ({share[0]:.0%}-{share[2]:.0%}), goal {case.goal:.0%}; "
            f"same gradients: {'yes' if cell['has_same_gradients'] else 'NO'}"
        )
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.activation-offload/2"}
        OUTPUT.write_text(json.dumps({**facts, "num_steps": num_steps, "cells": cells}, indent=1) + "\n")
    return 0 if all(cell["holds"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
