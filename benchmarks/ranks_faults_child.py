"""A small model that ranks train over `memwall.steps`, in tens of milliseconds a step; see ranks_faults.py.

    python benchmarks/ranks_faults_child.py OUT --steps 40 [--fsdp2]

Writes the weights that each rank ends with.
"""

import argparse
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
for _step in memwall.steps(asked.steps):
    wrapped(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

standing = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
torch.save([tensor.detach().clone() for tensor in standing], asked.out / f"{rank}.pt")
