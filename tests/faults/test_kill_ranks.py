"""One of several ranks is killed within a step: as many go on bit-equal, from the last step that all have."""

import json
from pathlib import Path

import pytest
import torch
from rank_runs import started_ranks
from torch.utils._pytree import tree_leaves

from memwall.cli.app import main

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "train_elastic.py")


def trained(folder: Path, *options: str, num_ranks: int = 2, resumes: bool = False) -> bool:
    """Returns whether a rank failed."""
    under = ("-m", "memwall", "run", "--budget", "4GiB", "--checkpoint", str(folder / "steps"), "--resume")
    ranks = started_ranks(num_ranks, *(under if resumes else ()), SCRIPT, str(folder), *options, folder=folder)
    statuses = [rank.wait() for rank in ranks]
    return any(statuses)


def first_step(drawn: Path) -> int:
    """Returns the step that the last run which drew samples began with."""
    steps = [json.loads(line)[0] for line in drawn.read_text().splitlines()]
    return next(step for step, before in reversed(list(zip(steps[1:], steps, strict=False))) if step <= before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("divided", [(), ("--fsdp2",)], ids=["ddp", "fsdp2"])
def test_a_rank_is_killed_in_a_step(tmp_path: Path, divided: tuple[str, ...]) -> None:
    assert not trained(tmp_path, *divided)
    plain = torch.load(tmp_path / "whole.pt")
    assert trained(tmp_path, *divided, "--die-in", "5", resumes=True)
    assert not trained(tmp_path, *divided, resumes=True)
    assert first_step(tmp_path / "samples-0-of-2.jsonl") in (4, 5)
    resumed = torch.load(tmp_path / "whole.pt")
    pairs = zip(tree_leaves(plain), tree_leaves(resumed), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
    of_rank, out = str(tmp_path / "steps" / "rank-1-of-2"), str(tmp_path / "weights.safetensors")
    assert main(["checkpoint", of_rank, "-o", out]) == (2 if divided else 0)
    assert main(["checkpoint", str(tmp_path / "steps"), "-o", out]) == 0


def test_gradients_of_three_ranks_are_summed_in_the_order_of_the_interrupted_run(tmp_path: Path) -> None:
    """GIVEN buckets made anew after the first step WHEN a later one is resumed THEN no sum is rounded otherwise."""
    assert not trained(tmp_path, num_ranks=3)
    plain = torch.load(tmp_path / "whole.pt")
    assert not trained(tmp_path, "--steps", "4", num_ranks=3, resumes=True)
    assert not trained(tmp_path, "--steps", "5", num_ranks=3, resumes=True)  # so few that its own buckets do not stand
    assert not trained(tmp_path, num_ranks=3, resumes=True)
    resumed = torch.load(tmp_path / "whole.pt")
    pairs = zip(plain["model"].values(), resumed["model"].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
