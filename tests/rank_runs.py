"""Scripts run by torchrun, as a user starts them: each rank leaves what it found in a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["PRELUDE", "found_by_ranks", "launched"]

PRELUDE = """
import json, os, sys
import torch
from torch import distributed, nn
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, num_ranks = distributed.get_rank(), distributed.get_world_size()

def found(**values):
    with open(os.path.join(os.environ["FOUND_IN"], f"{rank}.json"), "w") as file:
        json.dump(values, file)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads, which ask for the interpreter, abort a process whose interpreter is ending
"""
"""Begins a script: `found(name=value, ...)` ends it."""


def launched(num_ranks: int, *command: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs `torchrun --nproc-per-node num_ranks COMMAND`, with the tests' helpers on the path."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone", *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )


def found_by_ranks(num_ranks: int, script: str, folder: Path) -> list[dict[str, Any]]:
    """Runs a script on so many ranks; returns what each of them found, in the order of their numbers."""
    (folder / "script.py").write_text(PRELUDE + script)
    result = launched(num_ranks, str(folder / "script.py"), folder=folder, FOUND_IN=str(folder))
    paths = [folder / f"{rank}.json" for rank in range(num_ranks)]
    assert all(path.exists() for path in paths), result.stderr[-6000:]
    return [json.loads(path.read_text()) for path in paths]
