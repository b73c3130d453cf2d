"""One program of `allocator_programs.py` on this machine's GPU, with the history on: run by `gpu_truth.py`.

    PYTORCH_CUDA_ALLOC_CONF=... python benchmarks/gpu_record_case.py static-mlp FOLDER SNAPSHOTS

Waits for a line on standard input before it touches the device. Writes the record into FOLDER, the whole snapshot into
SNAPSHOTS, and prints one JSON object.
"""

import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import zstandard
from allocator_programs import PROGRAMS
from allocator_record import EMPTY_CACHE, MEMORY_FRACTION, AllocatorRecord, record_of, save_record
from gpu_device import device_name, tag
from prediction_child import own_standard_output


class CudaMarks:
    """Marks in a running history: taking a snapshot leaves an event, and the names are kept beside."""

    def __init__(self, total_bytes: int) -> None:
        self.names: list[str] = []
        self._total_bytes = total_bytes

    def phase(self, name: str) -> None:
        self._mark(f"phase {name}")

    def empty_cache(self) -> None:
        self._mark(EMPTY_CACHE)
        torch.cuda.empty_cache()

    def limit(self, num_bytes: int) -> None:
        fraction = num_bytes / self._total_bytes
        self._mark(f"{MEMORY_FRACTION} {fraction!r}")
        torch.cuda.set_per_process_memory_fraction(fraction)

    def _mark(self, text: str) -> None:
        self.names.append(text)
        torch.cuda.memory._snapshot()


def recorded(program: str) -> tuple[AllocatorRecord, dict[str, Any]]:
    """Runs a program from the process's first allocation on; its record, and the snapshot that it was made from."""
    free_bytes, _ = torch.cuda.mem_get_info()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.memory._record_memory_history(context=None)
    marks = CudaMarks(total_bytes)
    PROGRAMS[program](marks, "cuda")
    torch.cuda.synchronize()
    statistics = {name: count for name, count in torch.cuda.memory_stats().items() if isinstance(count, int)}
    snapshot = torch.cuda.memory._snapshot()
    record = record_of(
        snapshot,
        marks.names,
        program=program,
        tag=tag(),
        device=device_name(),
        torch=str(torch.__version__),
        settings=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        statistics=statistics,
    )
    return record, snapshot


def main() -> None:
    """Standard output carries nothing but the one line."""
    program, folder, snapshots = sys.argv[1:]
    warnings.simplefilter("ignore")
    with own_standard_output() as lines:
        sys.stdin.readline()
        record, snapshot = recorded(program)
        save_record(record, Path(folder))
        Path(snapshots).mkdir(parents=True, exist_ok=True)
        packed = zstandard.ZstdCompressor(level=10).compress(pickle.dumps(snapshot))
        (Path(snapshots) / f"{record.name}.pickle.zst").write_bytes(packed)
        print(json.dumps({"name": record.name, "num_events": len(record.events)}), file=lines, flush=True)


if __name__ == "__main__":
    main()
