"""The claim: what recomputed blocks begin from goes to disk and comes back at next to no cost.

    python benchmarks/block_inputs.py [--steps 9] [--disk DIR]
    python benchmarks/block_inputs.py --quick         # three layers, two steps; nothing is written

GPT-2 with 124M parameters (transformers, 4 x 512 tokens, float32, AdamW), each block of which is run again in backward.
In turns, in one process: as that is, and with the blocks' inputs on disk meanwhile. How far apart two equal arms are
says the plain recomputation, run twice in each round. Weights are never stepped, so that all gradients are to be the
same bits. Writes results/cpu/block_inputs.json.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance
from raw_disk import io_bytes
from transformers import GPT2Config, GPT2LMHeadModel

from memwall.apply.blocks.executor import BlockExecutor, resolve_blocks
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.parking import open_engine
from memwall.apply.techniques.offload import OffloadLayer
from memwall.apply.techniques.recompute import RecomputeLayer
from memwall.planning.menu import MIN_MOVED_BYTES, WINDOW_BYTES
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.process import TENSOR_HEAP

OUTPUT = Path(__file__).parent / "results" / "cpu" / "block_inputs.json"
NUM_LAYERS, BATCH, NUM_TOKENS = 12, 4, 512
MAX_TIME_RATIO = 1.05
ARMS = ("kept", "on disk", "kept again")


def add_layers(executor: BlockExecutor, blocks: Sequence[str], engine: ActivationOffload | None) -> None:
    """All blocks run again; their inputs leave in between, as in a plan those of all but the last one do."""
    for block in blocks:
        executor.add(block, RecomputeLayer(Recompute(block=block)))
    for block in blocks[:-1] if engine is not None else ():
        executor.add(block, OffloadLayer(engine))


def measure(num_layers: int, num_steps: int, directory: str) -> dict[str, Any]:
    """Alternating steps of one model."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=num_layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (BATCH, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    blocks = [f"transformer.h.{number}" for number in range(num_layers)]
    modules = resolve_blocks([model], [""])
    allocator = AllocatorHandler()
    engine, close = open_engine(
        [model],
        disk=directory,
        capacity_bytes=None,
        window_bytes=WINDOW_BYTES,
        min_bytes=MIN_MOVED_BYTES,
        owns_pages=allocator.owns_pages,
    )
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    written, digests = [], set()
    allocator.apply(TENSOR_HEAP)  # as under every plan
    try:
        for number in range(num_steps + 1):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                executor = BlockExecutor(modules, blocks)
                add_layers(executor, blocks, engine if arm == "on disk" else None)
                executor.apply()
                executor.begin_step()
                before, begin = io_bytes()[1], time.perf_counter()
                model(input_ids=ids, labels=ids).loss.backward()
                if number:  # in the first one pages and files are new
                    seconds[arm].append(time.perf_counter() - begin)
                    if arm == "on disk":
                        written.append(io_bytes()[1] - before)
                digest = hashlib.sha256()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    digest.update(parameter.grad.numpy().data)
                digests.add(digest.hexdigest())
                model.zero_grad()
                executor.undo()
            print(f"step {number} of {num_steps}", file=sys.stderr)
    finally:
        close()
        allocator.undo()
    pairs = list(zip(*seconds.values(), strict=True))
    return {
        "num_layers": num_layers,
        "num_steps": num_steps,
        "input_bytes": BATCH * NUM_TOKENS * config.n_embd * 4,
        "written_bytes": statistics.median(written),
        "seconds": {arm: quartiles(found) for arm, found in seconds.items()},
        # Each beside the mean of those before and after it.
        "time_ratio": quartiles([2 * disk / (kept + again) for kept, disk, again in pairs]),
        "time_ratio_of_equal_arms": quartiles([again / kept for kept, _, again in pairs]),
        "has_same_gradients": len(digests) == 1,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description="inputs of recomputed blocks on disk, beside keeping them")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="three layers, two steps; nothing is written")
    options = parser.parse_args(arguments)
    found = measure(3, 2, options.disk) if options.quick else measure(NUM_LAYERS, options.steps, options.disk)
    low, middle, high = found["time_ratio"]
    print(
        f"{found['written_bytes'] / 2**20:,.0f} MiB of inputs to disk: step {found['seconds']['kept'][1]:.3f} -> "
        f"{found['seconds']['on disk'][1]:.3f} s, ratio {middle:.3f} ({low:.3f}-{high:.3f}); equal arms "
        f"{found['time_ratio_of_equal_arms'][1]:.3f}; gradients {'equal' if found['has_same_gradients'] else 'DIFFER'}"
    )
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.block-inputs/1"}
        OUTPUT.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    return 0 if found["has_same_gradients"] and (options.quick or middle <= MAX_TIME_RATIO) else 1


if __name__ == "__main__":
    sys.exit(main())
