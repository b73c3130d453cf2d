"""One rank of `ranks_bytes.py`: what each form of a training step holds, every operation metered.

    torchrun --nproc-per-node 2 ranks_bytes_child.py FOLDER KIND...

A kind is the file of a plan in FOLDER, by which the model is divided. Each rank leaves what it found in
FOLDER/rank.json: the most bytes that tensors held in a step, by "KIND, FORM".
"""

import json
import sys
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
from ranks_bytes import FORMS, MIN_BYTES, NUM_BLOCKS, made_batch
from sharded_runs import LiveBytes, Model, loss_of


def actions_of(form: str, prefix: str) -> list[Any]:
    """Returns what a form does to each block."""
    blocks = [f"{prefix}blocks.{number}" for number in range(NUM_BLOCKS)] if form != "plain" else []
    if form == "recompute":
        return [Recompute(block=block) for block in blocks]
    away: dict[str, Any] = {"scope": "saved", "tier": "disk", "min_bytes": MIN_BYTES, "window_bytes": 32 << 20}
    return [Offload(block=block, **away) for block in blocks]


def peak_bytes(plan: Path, form: str) -> int:
    """Returns the most that tensors of a rank hold in the fourth step: the first ones prove a plan's actions."""
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
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        held = (*model.parameters(), *state, *buckets.values(), tokens)
        with LiveBytes([getattr(tensor, "_local_tensor", tensor) for tensor in held]) as meter:
            step()
    return meter.peak_bytes


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
