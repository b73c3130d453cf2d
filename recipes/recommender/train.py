"""A click model with a table of 8 million users: most of its rows are never touched, and memwall keeps it on disk.

With `--plain` torch's own table and its optimizer keep 1.5 GiB in memory.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--out", default="clicks.pt", help="where the trained dense weights go")
parser.add_argument("--tiny", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plain", action="store_true", help="torch's own table in place of memwall's")
args = parser.parse_args()
num_users, num_items, width, batch = (500_000, 2_000, 16, 256) if args.tiny else (8_000_000, 50_000, 16, 4096)
num_steps = 4 if args.tiny else args.steps
torch.manual_seed(0)

items = nn.Embedding(num_items, width)
dense = nn.Sequential(nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
if args.plain:
    users = nn.Embedding(num_users, width, sparse=True)
    nn.init.zeros_(users.weight)
else:
    from memwall import RowEmbedding

    users = RowEmbedding(num_users, width, cache="64MiB", scale=0.0)
optimizer = torch.optim.Adam([*items.parameters(), *dense.parameters()], lr=1e-3)
row_optimizer = torch.optim.SparseAdam(users.parameters(), lr=1e-3)
torch.manual_seed(1)  # both tables see the same clicks: making torch's drew numbers

for step in range(num_steps):
    begin = time.perf_counter()
    # A few users click often, most of them hardly ever.
    who = (num_users * torch.rand(batch).pow(4)).long()
    what = torch.randint(num_items, (batch,))
    clicked = ((who + what) % 3 == 0).float()
    loss = F.binary_cross_entropy_with_logits(dense(torch.cat([users(who), items(what)], 1)).squeeze(1), clicked)
    loss.backward()
    for each in (optimizer, row_optimizer):
        each.step()
        each.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
torch.save({"items": items.state_dict(), "dense": dense.state_dict()}, args.out)
