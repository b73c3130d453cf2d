"""A run is continued by another number of ranks: bit for bit what was committed, and each sample once."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from free_ports import free_port
from rank_runs import started_ranks, torchrun_started
from torch.utils._pytree import tree_leaves

from memwall.cli.app import main

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "train_elastic.py")
MOST_SECONDS = 60
SAMPLES, GLOBAL_BATCH = 240, 24


def command(folder: Path, *options: str) -> tuple[str, ...]:
    run = ("-m", "memwall", "run", "--budget", "4GiB", "--checkpoint", str(folder / "steps"), "--resume")
    return (*run, SCRIPT, str(folder), *options)


def trained(folder: Path, num_ranks: int, *options: str, is_killed: bool = False) -> Any:
    """Returns the whole weights and optimizer state that ranks end with."""
    ranks = started_ranks(num_ranks, *command(folder, *options), folder=folder)
    try:
        statuses = [rank.wait(timeout_s=MOST_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert any(statuses) == is_killed, "\n".join(rank.said[-3000:] for rank in ranks)
    return None if is_killed else torch.load(folder / "whole.pt")


def are_equal(one: Any, other: Any) -> bool:
    pairs = itertools.zip_longest(tree_leaves(one), tree_leaves(other))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def steps_drawn(folder: Path) -> dict[int, tuple[float, list[int]]]:
    """Returns learning rate and samples of each step; where it was done twice, those of the last time."""
    found: dict[int, dict[str, tuple[float, list[int]]]] = {}
    for path in sorted(folder.glob("samples-*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            step, rate, samples = json.loads(line)
            num_ranks = path.stem.rpartition("-")[2]
            of_step = found.setdefault(step, {})
            if any(name.rpartition("-")[2] != num_ranks for name in of_step):
                of_step.clear()
            of_step[path.stem] = rate, samples
    return {
        step: (next(iter(ranks.values()))[0], [one for _, samples in ranks.values() for one in samples])
        for step, ranks in found.items()
    }


def check_samples(folder: Path, num_steps: int) -> None:
    """Each sample of the epoch once, each global batch whole, and the learning rate by how many there were."""
    found = steps_drawn(folder)
    assert sorted(found) == list(range(num_steps))
    assert [len(samples) for _, samples in found.values()] == [GLOBAL_BATCH] * num_steps
    every = [one for _, samples in found.values() for one in samples]
    assert len(set(every)) == len(every)
    for step, (rate, _) in found.items():
        assert rate == pytest.approx(1e-3 * (1 - 0.9 * (step + 1) * GLOBAL_BATCH / SAMPLES))


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("divided", ["--fsdp2", pytest.param("", marks=pytest.mark.exhaustive)], ids=["fsdp2", "ddp"])
def test_fewer_ranks_go_on(tmp_path: Path, divided: str) -> None:
    """GIVEN three ranks of which one is killed THEN two go on from what they had."""
    options = (divided,) if divided else ()
    trained(tmp_path, 3, "--steps", "5", "--die-in", "3", *options, is_killed=True)
    assert main(["checkpoint", str(tmp_path / "steps"), "-o", str(tmp_path / "killed.pt")]) == 0
    killed = torch.load(tmp_path / "killed.pt")
    num_steps = killed["step"]
    assert num_steps in (2, 3)
    two = trained(tmp_path, 2, "--steps", str(num_steps), *options)
    wrapper = "" if options else "module."  # of DistributedDataParallel
    assert are_equal(two["model"], {key: killed["model"][f"{wrapper}{key}"] for key in two["model"]})
    assert are_equal(list(two["optimizer"]["state"].values()), list(killed["optimizer"]["state"].values()))
    trained(tmp_path, 2, "--steps", "10", *options)
    check_samples(tmp_path, 10)
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("divided", ["--fsdp2", ""], ids=["fsdp2", "ddp"])
def test_a_node_is_lost(tmp_path: Path, divided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two launchers with two ranks each WHEN one dies with its ranks THEN the other's two train on to the end."""
    # torch's own groups find addresses of ranks that have ended where restarted ones share a store with them.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    shared = ("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d")
    shared += ("--rdzv-id", "elastic", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    options = command(tmp_path, "--die-in", "4", "--with-node", *((divided,) if divided else ()))
    nodes: list[subprocess.Popen[str]] = []
    try:
        for is_host in ("true", "false"):
            conf = f"is_host={is_host},last_call_timeout=5,join_timeout=100,keep_alive_interval=1"
            nodes.append(torchrun_started(*shared, "--rdzv-conf", conf, *options, folder=tmp_path))
        _, errors = nodes[0].communicate(timeout=300)
    finally:
        for node in nodes:
            node.kill()
    assert nodes[0].returncode == 0, errors[-6000:]
    died = min(path.stat().st_mtime for path in tmp_path.glob("* died"))
    first_again = min(path.stat().st_ctime for path in (tmp_path / "steps").glob("rank-*-of-2"))
    assert first_again - died < MOST_SECONDS
    check_samples(tmp_path, 10)
