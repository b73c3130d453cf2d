"""One of two ranks is killed, ended or stopped at any instant: the other ends too, and the run goes on bit-equal."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memwall.cli.app import main

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "train_ranks_resumable.py")
MOST_SECONDS = 60


def launched(num_ranks: int, *command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs `torchrun --nproc-per-node num_ranks COMMAND`, which is what ends the other ranks."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone", *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def trained(folder: Path, *options: str, resumes: bool = False) -> int:
    under = ("-m", "memwall", "run", "--budget", "4GiB", "--checkpoint", str(folder / "steps"), "--resume")
    result = launched(2, *(under if resumes else ()), SCRIPT, str(folder), *options, folder=folder)
    return result.returncode


def weights(folder: Path) -> list[str]:
    return [(folder / f"{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.parametrize("divided", [(), ("--fsdp2",)], ids=["ddp", "fsdp2"])
def test_a_rank_is_killed_in_a_step(tmp_path: Path, divided: tuple[str, ...]) -> None:
    assert trained(tmp_path, *divided) == 0
    plain = weights(tmp_path)
    assert trained(tmp_path, *divided, "--in-step", "5", resumes=True) == 1
    assert trained(tmp_path, *divided, resumes=True) == 0
    assert weights(tmp_path) == plain
    of_rank, out = str(tmp_path / "steps" / "rank-1-of-2"), str(tmp_path / "weights.safetensors")
    assert main(["checkpoint", of_rank, "-o", out]) == (2 if divided else 0)
    assert main(["checkpoint", str(tmp_path / "steps")]) == 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_a_rank_ends_at_any_instant(tmp_path: Path, signal: str) -> None:
    """GIVEN instants between steps and within them THEN no rank hangs, and the run ends as one that nobody ended."""
    steps = ("--steps", "200")
    assert trained(tmp_path, *steps) == 0
    expected, instants = weights(tmp_path), random.Random(signal)
    for number in range(3):
        after = f"{instants.uniform(0.01, 0.4 * (number + 1)):.3f}"
        assert trained(tmp_path, *steps, "--end-by", signal, "--after", after, resumes=True) == 1
        # torchrun gives a process that does not answer to SIGTERM 30 of them.
        assert time.time() - (tmp_path / "ended").stat().st_mtime < MOST_SECONDS
    assert trained(tmp_path, *steps, resumes=True) == 0
    assert weights(tmp_path) == expected
