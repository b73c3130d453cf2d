"""Trains under DistributedDataParallel or FSDP2 over `memwall.steps`; rank 1 ends itself by a signal if told to.

torchrun --nproc-per-node 2 -m memwall run --budget 4GiB --checkpoint DIR --resume train_ranks_resumable.py OUT
"""

import argparse
import hashlib
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import memwall

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--end-by", default="SIGKILL")
parser.add_argument("--in-step", type=int, default=-1)
parser.add_argument("--after", type=float, default=0.0, help="seconds after the first step that this process does")
parser.add_argument("--fsdp2", action="store_true", help="divide the model, instead of DistributedDataParallel")
asked = parser.parse_args()

torch.set_num_threads(1)
distributed.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = distributed.get_rank()


def end() -> None:
    (asked.out / "ended").touch()
    os.kill(os.getpid(), getattr(signal, asked.end_by))


torch.manual_seed(7)
blocks = (nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3))
model = nn.Sequential(*blocks, nn.Linear(64, 64))
if asked.fsdp2:
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
for num_done, step in enumerate(memwall.steps(asked.steps)):
    if rank == 1 and step == asked.in_step:
        end()
    if rank == 1 and asked.after and num_done == 1:
        threading.Timer(asked.after, end).start()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

standing = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
weights = b"".join(tensor.detach().numpy().tobytes() for tensor in standing)
(asked.out / f"{rank}.txt").write_text(hashlib.sha256(weights).hexdigest())
