"""A small model that ranks train over `memwall.steps`, in tens of milliseconds a step; see ranks_faults.py.

    python benchmarks/ranks_faults_child.py OUT --steps 40 [--fsdp2]
    python benchmarks/ranks_faults_child.py OUT --steps 6 --redoes --fails 3 1 backward

Writes the weights that each rank ends with; with --redoes how often and how long a session did steps again, too.
"""

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import memwall

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--fsdp2", action="store_true", help="divide the model, instead of DistributedDataParallel")
parser.add_argument("--redoes", action="store_true", help="hand batches to a session, which may take them again")
parser.add_argument("--fails", nargs=3, metavar=("STEP", "RANK", "PLACE"), help="forward or backward lacks memory once")
asked = parser.parse_args()

torch.set_num_threads(1)
distributed.init_process_group("gloo", timeout=timedelta(seconds=8))
rank = distributed.get_rank()
torch.manual_seed(7)
blocks = (nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3))
model = nn.Sequential(*blocks, nn.Linear(64, 64))
if asked.fsdp2:
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
    wrapped = model
else:
    wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
fails_at, fails_on, place = asked.fails or (0, 0, "")
waiting = [place] if int(fails_on) == rank else []


def lack(where: str, number: int) -> None:
    """Fails once, as where memory is out."""
    if [where] == waiting and number == int(fails_at):
        waiting.clear()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has no more")


def loss_of(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Returns the loss of one batch, which may lack memory where most of it is in use."""
    results = wrapped(rows)
    results.register_hook(lambda _: lack("backward", number))
    lack("forward", number)
    return results.square().mean()


session = memwall.fit(model, optimizer, budget="1TiB", disk=str(asked.out)) if asked.redoes else None
seconds = []
for step in range(1, asked.steps + 1) if asked.redoes else memwall.steps(asked.steps):
    began = time.perf_counter()
    batch = torch.randn(32, 64)
    if session is None:
        loss_of(batch, step).backward()
    else:
        session.compute_gradients(batch, lambda rows, number=step: loss_of(rows, number))
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - began)
if session is not None:
    session.close()
    told = {"num_recoveries": session.measured.oom_recoveries, "step_seconds": seconds}
    (asked.out / f"{rank}.json").write_text(json.dumps(told))

standing = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
torch.save([tensor.detach().clone() for tensor in standing], asked.out / f"{rank}.pt")
