"""memwall against DeepSpeed: how DeepSpeed is tuned, when the claim holds, and a whole run with a stand-in for it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from against_arms import Run, tuned
from against_deepspeed import main, verdict
from cgroup import CapUnavailable, memory_cap
from figures import untagged, without_unit

STAND_IN = {
    "num_parameters": 1,
    "losses": [5.0, 4.0, 3.0, 2.0],
    "step_seconds": [9.0, 8.0, 8.0, 8.0],
    "cgroup_peak_bytes": 1 << 30,
    "read_bytes_per_step": 3,
    "written_bytes_per_step": 2,
    "swap_file_bytes": 1,
}


def _run(seconds: float) -> Run:
    return Run(
        step_seconds=[seconds],
        phase_seconds=[seconds],
        read_bytes=[0],
        written_bytes=[0],
        losses=[],
        peak_bytes=1,
        whole_peak_bytes=1,
        disk_bytes=0,
        plan={},
    )


def test_deepspeed_keeps_what_makes_it_faster_and_nothing_else() -> None:
    seconds = {(): 4.0, ("a",): 5.0, ("b",): 3.0, ("b", "d"): 2.0}

    def run(settings: Sequence[str]) -> Run | str:
        return _run(seconds[tuple(settings)]) if tuple(settings) in seconds else "no such thing"

    kept, trials = tuned(run, [(name, (name,)) for name in "abcd"])
    assert kept == ("b", "d")
    assert [trial["is_kept"] for trial in trials] == [True, False, True, False, True]
    assert trials[3]["failed"] == "no such thing"


@pytest.mark.parametrize(
    ("ours_bytes", "ours_seconds", "limit_seconds", "is_held"),
    [
        (50, 2.0, 1.0, True),  # 1.5 times faster
        (51, 2.0, 1.0, False),  # more than half of the memory
        (50, 2.1, 1.0, False),  # not fast enough, and the disk would allow it
        (50, 2.8, 2.5, True),  # the disk forbids 1.5 times: within 1.15 of what it allows
        (50, 2.9, 2.5, False),
        (50, 2.1, 2.0, False),  # the limit is just 1.5 times faster: it forbids nothing
    ],
)
def test_the_claim_holds_by_speed_or_by_the_limit_of_the_disk(
    ours_bytes: int, ours_seconds: float, limit_seconds: float, is_held: bool
) -> None:
    assert verdict(100, ours_bytes, 3.0, ours_seconds, limit_seconds)["holds"] is is_held


@pytest.mark.cgroup
@pytest.mark.exhaustive
def test_a_quick_run_has_every_arm_and_says_whether_it_holds(tmp_path: Path) -> None:
    """GIVEN a DeepSpeed of 1 GiB and 8 s a step WHEN a small model is measured beside it THEN memwall's claim holds."""
    try:
        with memory_cap(1 << 30):
            pass
    except CapUnavailable as reason:
        pytest.skip(f"no memory group can be made here: {reason}")
    python, out, disk = tmp_path / "python", tmp_path / "out.json", tmp_path / "disk"
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] || echo '{json.dumps(STAND_IN)}'\n")
    python.chmod(0o700)
    disk.mkdir()
    assert main(["--quick", "--deepspeed", str(python), "--disk", str(disk), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert set(result["arms"]) == {"deepspeed", "memwall", "memwall-smallest", "plain"}
    assert result["verdicts"]["memwall"]["holds"]
    assert result["has_same_losses"] == {"deepspeed": False, "memwall": True, "plain": True, "memwall-smallest": True}
    assert sum(result["arms"]["memwall-smallest"]["written_bytes"]) > 0
    assert (without_unit(result), untagged(result)) == ([], [])
    assert list(disk.iterdir()) == []
