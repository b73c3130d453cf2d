"""Scripts run by ranks: each leaves what it found in a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from free_ports import meeting_place
from warm_python import Program, warm_python

__all__ = ["PRELUDE", "found_by_ranks", "run_ranks", "started_ranks", "torchrun_started"]

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


def torchrun_started(*arguments: str, folder: Path) -> "subprocess.Popen[str]":
    """Starts `torchrun ARGUMENTS`, which ends the other ranks when one has failed."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started_ranks(num_ranks: int, *arguments: str, folder: Path, **environment: str) -> list[Program]:
    """Starts `python ARGUMENTS` as each rank of one host, as torchrun would, whose own process they do without."""
    shared = {**meeting_place(num_ranks), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return [
        warm_python().start(*arguments, folder=folder, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(num_ranks)
    ]


def run_ranks(num_ranks: int, *arguments: str, folder: Path, timeout_s: float = 200, **environment: str) -> list[str]:
    """Runs `python ARGUMENTS` as each rank of one host.

    Returns:
        What each of them printed.
    """
    ranks = started_ranks(num_ranks, *arguments, folder=folder, **environment)
    try:
        done = [rank.wait(timeout_s=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert done == [0] * num_ranks, "\n".join(rank.said[-6000:] for rank in ranks)
    return [rank.printed for rank in ranks]


def found_by_ranks(num_ranks: int, script: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Runs a script on so many ranks; returns what each of them found, in the order of their numbers."""
    (folder / "script.py").write_text(PRELUDE + script)
    run_ranks(num_ranks, str(folder / "script.py"), folder=folder, FOUND_IN=str(folder), **environment)
    paths = [folder / f"{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) for path in paths]
