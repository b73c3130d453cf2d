"""The frontier benchmark: how it searches, what it takes for the least a step can take, and that its arms agree."""

import argparse
from pathlib import Path

import pytest
from cgroup import CapUnavailable, memory_cap
from deepspeed_process import why_no_deepspeed
from disk_bound import bound_seconds, sustained
from frontier import holds
from frontier_trials import Trial, largest, layers_for, layers_on_disk, run, run_with_swap
from swap_file import SwapUnavailable, swap_file

MIB = 1 << 20


def _needs_cap() -> None:
    try:
        with memory_cap(1 << 30):
            pass
    except CapUnavailable as reason:
        pytest.skip(f"no memory cap can be enforced here: {reason}")


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 6, 7, 40])
@pytest.mark.parametrize("guess", [1, 6, 30])
def test_the_largest_is_found_with_few_trials(limit: int, guess: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert largest(fits, guess) == limit
    assert len(asked) == len(set(asked))
    assert len(asked) <= 2 + 2 * max(limit, guess).bit_length()
    assert min(asked) > 0


def test_a_layer_takes_sixteen_bytes_of_disk_per_parameter() -> None:
    assert layers_on_disk(768, 15 * 10**9) == 132


def test_the_goal_is_counted_in_parameters() -> None:
    one = 12 * 512 * 512 + 13 * 512
    plain = Trial(
        layers=4,
        num_parameters=4 * one + 400_000,
        has_trained=True,
        is_oom_killed=False,
        peak_bytes=0,
        build_seconds=0.0,
        steps=[],
        reason="",
    )
    layers = layers_for(8, plain, 512)
    assert layers * one + 400_000 >= 8 * plain.num_parameters
    assert (layers - 1) * one + 400_000 < 8 * plain.num_parameters


def test_transfers_hide_behind_the_arithmetic_of_their_own_phase() -> None:
    # Forward hides its reads, backward does not, and the step is as long as its transfers.
    assert bound_seconds([10.0, 1.0, 0.0], [10, 20, 10], [0, 0, 40], 10.0, 20.0) == 10.0 + 2.0 + (1.0 + 2.0)


def test_the_speed_is_that_of_a_whole_file_of_the_size_asked_for(tmp_path: Path) -> None:
    speed = sustained(str(tmp_path), 8 * MIB)
    assert speed.file_bytes == 8 * MIB
    assert min(speed.read_bytes_per_second, speed.write_bytes_per_second) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_times_plain", "bound", "missed"),
    [
        (8.0, {"num_times_bound": 1.25, "is_plausible": True}, set()),
        (7.9, {"num_times_bound": 1.25, "is_plausible": True}, {"has_parameters"}),
        (8.0, {"num_times_bound": 1.26, "is_plausible": True}, {"is_near_bound"}),
        (8.0, {"num_times_bound": 0.80, "is_plausible": False}, {"is_near_bound"}),
        (0.0, None, {"has_parameters", "is_near_bound"}),
    ],
)
def test_a_goal_is_reached_or_named(num_times_plain: float, bound: dict[str, object] | None, missed: set[str]) -> None:
    row = {"has_same_losses": True, "num_times_plain": num_times_plain} | ({} if bound is None else {"bound": bound})
    assert {name for name, is_held in holds(row, 8).items() if not is_held} == missed


def test_why_deepspeed_does_not_run_is_said(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert str(python) in str(why_no_deepspeed(python))
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    assert "finds no DeepSpeed" in str(why_no_deepspeed(python))
    python.write_text("#!/bin/sh\nexit 0\n")
    assert why_no_deepspeed(python) is None


@pytest.mark.cgroup
def test_what_stops_deepspeed_is_its_result(tmp_path: Path) -> None:
    _needs_cap()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started >&2\necho 'no queue left' >&2\nexit 3\n")
    python.chmod(0o700)
    disk = tmp_path / "disk"
    disk.mkdir()
    options = argparse.Namespace(width=128, tokens=8, steps=2, threads=1, disk=str(disk), deepspeed=python)
    trial = run("deepspeed", 1, 256 * MIB, options)
    assert (trial.has_trained, trial.reason) == (False, "status 3: no queue left")
    assert list(disk.iterdir()) == []


@pytest.mark.cgroup
@pytest.mark.slow
def test_what_exceeds_the_cap_goes_to_a_swap_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    _needs_cap()
    options = argparse.Namespace(width=512, tokens=64, steps=1, threads=1, disk=str(tmp_path))
    before = Path("/proc/swaps").read_text()
    try:
        with swap_file(str(tmp_path), 768 * MIB) as path:
            assert str(path) in Path("/proc/swaps").read_text()
            trial = run_with_swap(3, 256 * MIB, 100, options)
    except SwapUnavailable as reason:
        pytest.skip(f"no swap can be had here: {reason}")
    assert trial.has_trained
    assert len(trial.steps) == 1
    assert trial.peak_bytes <= 256 * MIB
    assert Path("/proc/swaps").read_text() == before
    assert list(tmp_path.iterdir()) == []


def test_a_swap_file_without_room_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwapUnavailable, match=r"only root|bytes free"), swap_file(str(tmp_path), 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_arms_train_to_the_same_losses_under_a_cap(tmp_path: Path) -> None:
    _needs_cap()
    options = argparse.Namespace(width=512, tokens=128, steps=2, threads=1, disk=str(tmp_path))
    plain, streamed = (run(arm, 2, 700 * MIB, options) for arm in ("plain", "memwall"))
    assert plain.has_trained
    assert [step["loss"] for step in streamed.steps] == [step["loss"] for step in plain.steps]
    assert streamed.steps[-1]["disk_bytes"] >= 16 * 2 * 12 * 512 * 512
    assert list(tmp_path.iterdir()) == []
