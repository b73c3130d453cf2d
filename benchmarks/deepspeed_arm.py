"""One process that trains a GPT under DeepSpeed, ZeRO-3 with NVMe unless told otherwise; prints one JSON object.

    python benchmarks/deepspeed_arm.py --width 768 --layers 12 --disk DIR [--steps 5]

An arm for benchmarks that give it a memory cap. The settings are those of `plan.deepspeed_config()`; each that decides
speed or memory can be set here, so that a benchmark can look for DeepSpeed's best. The optimizer is AdamW as DeepSpeed
has it for the CPU. Needs DeepSpeed, whose operators are compiled at the first use; `make test-deepspeed` makes an
environment with both, and `make deepspeed-arm ARM="--width 768"` runs this file in it.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cgroup import own_group_peak_bytes
from free_ports import meeting_place
from raw_disk import io_bytes
from torch.utils.checkpoint import checkpoint
from workloads import GPT, WORKLOADS

from memwall.planning.action import Action
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.optimizer_state import OptimizerPlacement

__all__ = ["main"]

_TEXT_ROWS, _TEXT_TOKENS = 7, 512


def _plan(options: argparse.Namespace) -> Plan:
    """The plan of which the configuration is made; nothing was predicted for it."""
    actions: list[Action] = []
    if options.state == "nvme":
        bucket_bytes = options.sub_group_elements * 8
        actions.append(OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=bucket_bytes, min_bytes=1 << 20))
    if options.dtype == "bfloat16":
        actions.append(Autocast(dtype="bfloat16"))
    peak = PeakBytes(allocated_bytes=0, process_bytes=0)
    forecast = Forecast(
        device="cpu",
        source="fake",
        fits=None,
        budget_bytes=None,
        margin_bytes=0,
        peak=peak,
        phases={},
        step_seconds=None,
        not_modelled=(),
        actions=tuple(actions),
    )
    return Plan(model_fingerprint="", trace_hash="", micro_batch=options.batch, num_micro_batches=1, forecast=forecast)


def _config(options: argparse.Namespace, disk: str) -> dict[str, Any]:
    with torch.device("meta"):
        shape = _model(options)
    config = _plan(options).deepspeed_config(
        world_size=1, model=shape, disk=disk, stage=options.stage, offload_parameters=options.parameters
    )
    zero = config["zero_optimization"]
    if options.state == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if "offload_param" in zero and options.buffer_count:
        zero["offload_param"]["buffer_count"] = options.buffer_count
    for name in ("pipeline_read", "pipeline_write"):
        if zero.get("offload_optimizer", {}).get("device") == "nvme":
            zero["offload_optimizer"][name] = getattr(options, name)
    if "aio" in config:
        config["aio"] |= {
            "block_size": options.block_bytes,
            "queue_depth": options.queue_depth,
            "intra_op_parallelism": options.io_threads,
            "single_submit": options.single_submit,
            "overlap_events": not options.no_overlap_events,
        }
    return config


def _model(options: argparse.Namespace) -> GPT:
    return GPT(width=options.width, num_heads=options.heads, num_layers=options.layers, max_tokens=options.tokens)


def _train(options: argparse.Namespace, disk: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = _config(options, disk)
    begin = time.perf_counter()
    deepspeed.init_distributed("gloo")
    is_partitioned = config["zero_optimization"]["stage"] == 3
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if is_partitioned else nullcontext():
        model = _model(options)
    if options.checkpoint:
        for block in model.blocks:
            # On one rank the other kind saves weights out of NVMe buffers that are used again: wrong gradients.
            block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=3e-4, weight_decay=0.01, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    build_seconds = time.perf_counter() - begin
    text = WORKLOADS["gpt"]
    losses, step_seconds, moved = [], [], io_bytes()
    for step in range(options.steps):
        batch = {name: rows[: options.batch, : options.tokens] for name, rows in text.batch(step).items()}
        begin = time.perf_counter()
        loss = text.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        step_seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    after = io_bytes()
    return {
        "schema": "memwall.bench-deepspeed-arm/1",
        "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        "losses": losses,
        "step_seconds": step_seconds,
        # The first step records the order of parameters, and reads nothing ahead.
        "step_seconds_median": median(step_seconds[1:] or step_seconds),
        "build_seconds": build_seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cgroup_peak_bytes": own_group_peak_bytes(),
        "read_bytes_per_step": (after[0] - moved[0]) // options.steps,
        "written_bytes_per_step": (after[1] - moved[1]) // options.steps,
        "swap_file_bytes": sum(path.stat().st_size for path in Path(disk).rglob("*.swp")),
        "config": config,
        "versions": {name: metadata.version(name) for name in ("deepspeed", "torch")},
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a GPT under DeepSpeed in one process")
    for name, default in (("width", 256), ("layers", 4), ("heads", 4), ("tokens", 512), ("batch", 1), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights in use")
    parser.add_argument("--stage", type=int, default=None, help="of ZeRO; by default the lowest that does it")
    parser.add_argument("--state", choices=("none", "cpu", "nvme"), default="nvme", help="where the optimizer's is")
    parser.add_argument("--parameters", choices=("none", "cpu", "nvme"), default="nvme")
    parser.add_argument("--checkpoint", action="store_true", help="recompute every block")
    parser.add_argument("--disk", help="folder on a disk; by default the temporary directory")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sub-group-elements", type=int, default=4 << 20, help="elements stepped at a time")
    parser.add_argument("--buffer-count", type=int, default=0, help="for parameters; 0 for what the model needs")
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--io-threads", type=int, default=1)
    for flag in ("--single-submit", "--no-overlap-events", "--pipeline-read", "--pipeline-write"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    if options.batch > _TEXT_ROWS or options.tokens > _TEXT_TOKENS:
        parser.error(f"the text comes in batches of at most {_TEXT_ROWS} x {_TEXT_TOKENS}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and prints the object; what DeepSpeed prints goes to standard error."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    os.environ.update(meeting_place(1), RANK="0", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    result = os.dup(1)
    os.dup2(2, 1)
    disk = tempfile.mkdtemp(prefix="memwall-deepspeed-arm-", dir=options.disk)
    try:
        found = _train(options, disk)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    with os.fdopen(result, "w") as output:
        output.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
