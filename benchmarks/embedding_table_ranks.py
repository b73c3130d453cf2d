"""One rank of the embedding benchmark's exactness part: trains a small table, prints the hash of all rows as JSON."""

import argparse
import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memwall import RowEmbedding

DIM, BATCH = 64, 6144


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, nargs=2, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--load")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    table: Any = RowEmbedding(options.rows, DIM, cache="2MiB", disk=options.folder, gradients="sum")
    everything = torch.arange(options.rows)
    rows = table
    if options.plain:
        table = nn.Embedding(options.rows, DIM, sparse=True)
        table.load_state_dict({"weight": rows.rows(everything)})
    if options.load:
        table.load(options.folder / options.load)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    for step in range(*options.steps):
        generator = torch.Generator().manual_seed(step)
        ids = (torch.rand(BATCH, generator=generator) ** 3 * options.rows).long()
        scale = torch.randn(BATCH, DIM, generator=generator)
        mine = slice(BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks)
        optimizer.zero_grad()
        (table(ids[mine]) * scale[mine]).sum().backward()
        optimizer.step()
    if options.save:
        table.save(options.folder / options.save)
    weights: Tensor = table.weight.detach() if options.plain else table.rows(everything)
    found = {
        "sha256": hashlib.sha256(ctypes.string_at(weights.data_ptr(), weights.nbytes)).hexdigest(),
        "read_bytes": rows.store.bytes_read,
    }
    rows.close()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
