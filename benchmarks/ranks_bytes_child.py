"""One rank of `ranks_bytes.py`: what each form of a training step holds, every operation metered.

    torchrun --nproc-per-node 2 ranks_bytes_child.py FOLDER KIND...

A kind is the file of a plan in FOLDER, by which the model is divided. Each rank leaves what it found in
FOLDER/rank.json, by "KIND, FORM": the most bytes that tensors held in a step, that its process held in another, and
that this held as the other began.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import memwall
from memwall.planning.planfile import Plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from plans import plan_of
from ranks_bytes import FORMS, MIN_BYTES, NUM_BLOCKS, WINDOW_BYTES, made_batch
from sharded_runs import LiveBytes, Model, loss_of


def actions_of(form: str, prefix: str) -> list[Any]:
    """Returns what a form does to each block."""
    blocks = [f"{prefix}blocks.{number}" for number in range(NUM_BLOCKS)] if form != "plain" else []
    if form == "recompute":
        return [Recompute(block=block) for block in blocks]
    away: dict[str, Any] = {"scope": "saved", "tier": "disk", "min_bytes": MIN_BYTES, "window_bytes": WINDOW_BYTES}
    return [Offload(block=block, **away) for block in blocks]


def process_bytes(field: str) -> int:
    """Returns what the process holds, VmRSS, without what malloc keeps of freed memory; or has held at most, VmHWM."""
    if field == "VmRSS":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def process_peak_bytes(step: Callable[[], None]) -> tuple[int, int]:
    """Returns the most that the process holds while a step runs, and what it holds before."""
    before_bytes = process_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return process_bytes("VmHWM"), before_bytes


def peak_bytes(plan: Path, form: str) -> tuple[int, int, int]:
    """Returns the most that tensors of a rank hold in the fifth step: the first ones prove a plan's actions.

    After it stand the most that the process holds in the fourth, and what it holds before that.
    """
    torch.manual_seed(0)
    model: nn.Module = memwall.shard(Model(), Plan.load(plan))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), foreach=False), made_batch()
    buckets: dict[int, torch.Tensor] = {}

    def reduced(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets[bucket.index()] = bucket.buffer()  # the reducer's own, which no operation makes
        work = distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    is_ddp = isinstance(model, DistributedDataParallel)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, reduced)
    actions = actions_of(form, "module." if is_ddp else "")
    session = memwall.fit(model, optimizer, plan=plan_of(model, *actions, micro_batch=len(tokens)))
    with session:
        for _ in range(3):
            step()
        of_process = process_peak_bytes(step)
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        held = (*model.parameters(), *state, *buckets.values(), tokens)
        with LiveBytes([getattr(tensor, "_local_tensor", tensor) for tensor in held]) as meter:
            step()
    return meter.peak_bytes, *of_process


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    folder, found = Path(sys.argv[1]), {}
    for kind in sys.argv[2:]:
        for form in FORMS:
            found[f"{kind}, {form}"] = peak_bytes(folder / kind, form)
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
