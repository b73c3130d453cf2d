"""Trains under DistributedDataParallel or FSDP2 on any number of ranks, with one global batch and each sample once.

torchrun --nproc-per-node N -m memwall run --budget 4GiB --checkpoint DIR --resume train_elastic.py OUT --fsdp2
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import memwall

GLOBAL_BATCH, SAMPLES = 24, 240

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--fsdp2", action="store_true", help="divide the model, instead of DistributedDataParallel")
parser.add_argument("--die-in", type=int, default=-1, help="the last rank kills itself in this step, once")
parser.add_argument("--with-node", action="store_true", help="the ranks of its node and their launcher die with it")
asked = parser.parse_args()

torch.set_num_threads(1)
distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, num_ranks = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(7)
samples = torch.randn(SAMPLES, 30)
order = torch.randperm(SAMPLES)
blocks = (nn.Sequential(nn.Linear(30, 70), nn.ReLU(), nn.Dropout(0.1), nn.Linear(70, 30)) for _ in range(3))
model = nn.Sequential(*blocks, nn.BatchNorm1d(30, affine=False), nn.Linear(30, 5, bias=False))
if asked.fsdp2:
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
    wrapped = model
else:
    wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=SAMPLES // GLOBAL_BATCH)
torch.manual_seed(100 + rank)

with open(asked.out / f"samples-{rank}-of-{num_ranks}.jsonl", "a") as drawn:
    for step in memwall.steps(asked.steps):
        dies = os.environ["GROUP_RANK"] != "0" if asked.with_node else rank == num_ranks - 1
        if step == asked.die_in and dies and not (asked.out / f"{rank} died").exists():
            (asked.out / f"{rank} died").touch()
            if asked.with_node:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        mine = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH][rank::num_ranks]
        wrapped(samples[mine]).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        drawn.write(json.dumps([step, optimizer.param_groups[0]["lr"], mine.tolist()]) + "\n")
        drawn.flush()

of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    whole = {"model": of_model, "optimizer": of_optimizer, "schedule": schedule.state_dict()}
    torch.save(whole, asked.out / "whole.pt")
distributed.barrier()
distributed.destroy_process_group()  # gloo's threads abort a process whose interpreter is ending
