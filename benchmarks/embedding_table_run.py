"""One training run of the embedding benchmark, in a process of its own: prints one JSON object.

    python benchmarks/embedding_table_run.py --rows 20000000 [--plain]

A table behind a small network, on ids of a Zipf law. Rows are touched ahead of the timing, so that what is timed is a
run under way: the cache is full, and rows that are met again come from the disk.
"""

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memwall import RowEmbeddingBag
from memwall.machine.meter import process_bytes, process_peak_bytes

DIM, BAGS, BAG_SIZE = 64, 512, 8
_EXPONENT = 1.1
_FILL_IDS = 1 << 15
_STRIDE = 11_400_714_819_323


def zipf_ids(generator: torch.Generator, num_rows: int, *shape: int) -> Tensor:
    """Ids whose k-th most frequent has a share of about 1 / k**1.1, scattered over the table."""
    drawn = torch.rand(*shape, generator=generator, dtype=torch.float64)
    power = 1.0 - _EXPONENT
    rank = (1.0 + drawn * ((num_rows + 1.0) ** power - 1.0)) ** (1.0 / power)
    return (rank.long().clamp(1, num_rows) - 1) * _STRIDE % num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--plain", action="store_true", help="torch.nn.EmbeddingBag, in memory")
    parser.add_argument("--fill", type=int, default=0, help="steps of 32 768 ids ahead of the timing")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cache", default="768MiB")
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--no-prefetch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base_bytes = process_bytes()
    table: Any
    if options.plain:
        table = nn.EmbeddingBag(options.rows, DIM, mode="sum", sparse=True)
    else:
        table = RowEmbeddingBag(options.rows, DIM, mode="sum", cache=options.cache, disk=options.disk)
    constructed_bytes = process_bytes() - base_bytes
    head = nn.Sequential(nn.Linear(DIM, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=1e-3), torch.optim.Adam(head.parameters(), lr=1e-3)]
    generator = torch.Generator().manual_seed(1)

    def step(ids: Tensor, coming: Tensor | None) -> float:
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = table(ids)
        if coming is not None and not options.plain and not options.no_prefetch:
            table.prefetch(coming)
        loss = head(out).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return time.perf_counter() - begin

    begin = time.perf_counter()
    for _ in range(options.fill):
        step(zipf_ids(generator, options.rows, _FILL_IDS // BAG_SIZE, BAG_SIZE), None)
    fill_seconds = time.perf_counter() - begin
    store = None if options.plain else table.store
    before = (0, 0, 0) if store is None else (store.bytes_read, store.bytes_written, store.num_rows)
    seconds, begin_cpu = [], time.process_time()
    loader = deque(zipf_ids(generator, options.rows, BAGS, BAG_SIZE) for _ in range(2))
    for _ in range(options.steps):
        loader.append(zipf_ids(generator, options.rows, BAGS, BAG_SIZE))
        seconds.append(step(loader.popleft(), loader[-1]))
    cpu_seconds = time.process_time() - begin_cpu
    quartiles = statistics.quantiles(seconds, n=4)
    found: dict[str, Any] = {
        "rows": options.rows,
        "step_seconds_quartiles": quartiles,
        "step_seconds_mean": statistics.fmean(seconds),
        "cpu_seconds_per_step": cpu_seconds / options.steps,
        "fill_seconds": fill_seconds,
        "constructed_bytes": constructed_bytes,
        "process_peak_bytes": process_peak_bytes(),
    }
    if store is not None:
        found |= {
            "rows_touched": store.num_rows,
            "new_rows_per_step": (store.num_rows - before[2]) / options.steps,
            "read_bytes_per_step": (store.bytes_read - before[0]) / options.steps,
            "written_bytes_per_step": (store.bytes_written - before[1]) / options.steps,
            "held_bytes": store.memory_bytes,
            "disk_bytes": store.disk_bytes,
        }
        table.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
