"""A ranking model: sparse embedding bags by SparseAdam, dense layers by Adam."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
ROWS, WIDTH, BATCH, STEPS = 50_000, 32, 8192, 5
tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(4))
dense = nn.Sequential(
    nn.Linear(4 * WIDTH, 512), nn.ReLU(), *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4))
)
model = nn.ModuleDict({"tables": tables, "dense": dense, "head": nn.Linear(512, 1)})
optimizers = [
    torch.optim.SparseAdam(list(tables.parameters()), lr=1e-3),
    torch.optim.Adam([*dense.parameters(), *model["head"].parameters()], lr=1e-3),
]
for _ in range(STEPS):
    rows = torch.randint(ROWS, (4, BATCH, 5))
    x = torch.cat([table(part) for table, part in zip(tables, rows, strict=True)], 1)
    loss = F.binary_cross_entropy_with_logits(model["head"](dense(x)).squeeze(1), torch.rand(BATCH).round())
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
