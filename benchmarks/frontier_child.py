"""One GPT of one size trained for a few steps by one arm of the frontier; prints a JSON line after every step.

    python benchmarks/frontier_child.py --arm memwall --layers 4 --steps 2 --disk DIR

Arm "memwall" builds the model on disk; "planned" is an ordinary loop under `memwall.fit`, and tells of its plan in one
more line. Bytes read and written are the kernel's counters of this process.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from cgroup import own_group_peak_bytes
from memwall_arm import memwall_arm, tensor_heap
from raw_disk import io_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import GPT, WORKLOADS

# Smaller parameters stay in memory with all that belongs to them: norms, biases, and the 256 tokens' embedding.
_MIN_BYTES = 256 << 10
_WINDOW_BYTES = 32 << 20
_STATE_BYTES = 32 << 20

Facts = Callable[[], dict[str, Any]]


@contextmanager
def _plain(
    build: Callable[[], nn.Module], options: argparse.Namespace
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Facts]]:
    model = build()
    if options.arm == "checkpoint":
        for block in model.get_submodule("blocks").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    yield model, torch.optim.AdamW(model.parameters(), lr=3e-4), dict


@contextmanager
def _memwall(
    build: Callable[[], nn.Module], options: argparse.Namespace
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Facts]]:
    from memwall.apply.blocks.executor import BlockExecutor, resolve_blocks
    from memwall.apply.optimizer_state.bucketed_state import OptimizerState
    from memwall.apply.streaming.building import Building
    from memwall.apply.streaming.parameter_streaming import ParameterStreaming
    from memwall.apply.streaming.parameter_tier import ParameterTier
    from memwall.apply.streaming.places import DiskPlace
    from memwall.apply.techniques.recompute import RecomputeLayer
    from memwall.planning.techniques.recompute import Recompute
    from memwall.store.buckets import DiskSpace
    from memwall.store.scratch import ScratchFile
    from memwall.store.transfer import TransferPool

    with ExitStack() as stack:
        stack.enter_context(tensor_heap())
        pools = [stack.enter_context(TransferPool(ScratchFile(options.disk))) for _ in range(2)]
        tier = ParameterTier(DiskPlace(pools[0]), window_bytes=_WINDOW_BYTES, min_bytes=_MIN_BYTES)
        with Building(lambda _: True, lambda: tier):
            model = build()
        streaming = ParameterStreaming(model, tier)
        blocks = [f"blocks.{number}" for number in range(options.layers)]
        executor = BlockExecutor(resolve_blocks([model], [""]), blocks)
        for block in blocks:
            executor.add(block, RecomputeLayer(Recompute(block=block)))
        executor.apply()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        OptimizerState(
            optimizer,
            DiskSpace(pools[1]),
            resident_bytes=0,
            bucket_bytes=_STATE_BYTES,
            min_bytes=_MIN_BYTES,
            around_step=streaming.around_step,
        )

        def facts() -> dict[str, int]:
            return {"disk_bytes": sum(pool.scratch.reserved_bytes for pool in pools)}

        yield model, optimizer, facts


@contextmanager
def _planned(
    build: Callable[[], nn.Module], options: argparse.Namespace
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Facts]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with memwall_arm(model, optimizer, options.budget_bytes, options.disk) as facts:
        yield model, optimizer, dict
        print(json.dumps(facts()), flush=True)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description="trains one GPT of one size by one arm")
    parser.add_argument("--arm", choices=("plain", "checkpoint", "memwall", "planned"), required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--budget-bytes", type=int, default=0, help="of the planned arm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # All arms shall come to the same losses: https://github.com/pytorch/pytorch/issues/188792
    torch.ones(1).sqrt()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(options.width, options.width // 64, options.layers, options.tokens).train()

    workload = WORKLOADS["gpt"]
    arm = {"memwall": _memwall, "planned": _planned}.get(options.arm, _plain)
    begin = time.perf_counter()
    with arm(build, options) as (model, optimizer, facts):
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        print(json.dumps({"num_parameters": num_parameters, "build_seconds": time.perf_counter() - begin}), flush=True)
        for step in range(options.steps):
            batch = {name: value[:1, : options.tokens] for name, value in workload.batch(step).items()}
            seconds, counts = [time.perf_counter()], [io_bytes()]

            def mark(seconds: list[float] = seconds, counts: list[tuple[int, int]] = counts) -> None:
                seconds.append(time.perf_counter())
                counts.append(io_bytes())

            loss = workload.loss(model, batch)
            mark()
            loss.backward()
            mark()
            optimizer.step()
            optimizer.zero_grad()
            mark()
            row = {
                "loss": loss.item(),
                "phase_seconds": _differences(seconds),
                "read_bytes": _differences([read for read, _ in counts]),
                "written_bytes": _differences([written for _, written in counts]),
                "disk_bytes": 0,
                "group_peak_bytes": own_group_peak_bytes(),
            } | facts()
            print(json.dumps(row), flush=True)


def _differences(values: list[Any]) -> list[Any]:
    """Forward, backward, step."""
    return [later - earlier for earlier, later in pairwise(values)]


if __name__ == "__main__":
    main()
