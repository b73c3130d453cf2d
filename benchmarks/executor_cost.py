"""Measures what the executor costs besides the recomputation itself: per checkpointed block and selective operation.

    python benchmarks/executor_cost.py

`memwall/planning/menu.py` prices recomputation with these. A block of tiny operations is trained plain, checkpointed,
and
checkpointed with its results kept; arms are interleaved, and the median of the differences is printed with quartiles.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.blocks.recomputed import RecomputedBlock
from memwall.planning.techniques.recompute import Recompute

NUM_OPS, NUM_ROUNDS, NUM_BLOCKS = 40, 200, 4


class Chain(nn.Module):
    """Operations so small that only their overhead counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(NUM_OPS):
            x = x * self.weight
        return x


def step_seconds(forwards: list[Callable[..., Any]]) -> float:
    """One forward and backward through all blocks."""
    x = torch.ones(8, requires_grad=True)
    begin = time.perf_counter()
    for forward in forwards:
        x = forward(x)
    x.sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    torch.set_num_threads(1)
    blocks = [Chain() for _ in range(NUM_BLOCKS)]
    plain: list[Callable[..., Any]] = [block.forward for block in blocks]
    full = [RecomputedBlock(block, block.forward, Recompute(block="b")).run for block in blocks]
    # Keeping every result leaves nothing to recompute: what remains is the cost of asking for each operation.
    kept = tuple(range(NUM_OPS))
    selective = [RecomputedBlock(block, block.forward, Recompute(block="b", kept_ops=kept)).run for block in blocks]
    arms = {
        "plain": plain,
        "full": full,
        "selective": selective,
    }
    forward_only = []
    rounds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(NUM_ROUNDS):
        for name, forwards in arms.items():
            rounds[name].append(step_seconds(forwards))
        begin = time.perf_counter()
        x = torch.ones(8, requires_grad=True)
        for forward in plain:
            x = forward(x)
        forward_only.append(time.perf_counter() - begin)
    per_block = [
        (full_s - plain_s - forward_s) / NUM_BLOCKS
        for full_s, plain_s, forward_s in zip(rounds["full"], rounds["plain"], forward_only, strict=True)
    ]
    per_op = [
        (selective_s - plain_s) / NUM_BLOCKS / NUM_OPS
        for selective_s, plain_s in zip(rounds["selective"], rounds["plain"], strict=True)
    ]
    result = {
        "tag": "cpu-measured",
        "torch": torch.__version__,
        "checkpoint_seconds_quartiles": statistics.quantiles(per_block, n=4),
        "selective_seconds_per_op_quartiles": statistics.quantiles(per_op, n=4),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
