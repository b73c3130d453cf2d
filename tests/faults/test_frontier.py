"""The frontier benchmark: how it searches, what it takes for the least a step can take, and that its arms agree."""

import argparse
from pathlib import Path

import pytest
from cgroup import CapUnavailable, memory_cap
from frontier import Trial, bound_seconds, largest, layers_for, layers_on_disk, run

MIB = 1 << 20


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
        errors="",
    )
    layers = layers_for(8, plain, 512)
    assert layers * one + 400_000 >= 8 * plain.num_parameters
    assert (layers - 1) * one + 400_000 < 8 * plain.num_parameters


def test_transfers_hide_behind_the_arithmetic_of_their_own_phase() -> None:
    # Forward hides its reads, backward does not, and the step is as long as its transfers.
    assert bound_seconds([10.0, 1.0, 0.0], [10, 20, 10], [0, 0, 40], 10.0, 20.0) == 10.0 + 2.0 + (1.0 + 2.0)


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_arms_train_to_the_same_losses_under_a_cap(tmp_path: Path) -> None:
    try:
        with memory_cap(1 << 30):
            pass
    except CapUnavailable as reason:
        pytest.skip(f"no memory cap can be enforced here: {reason}")
    options = argparse.Namespace(width=512, tokens=128, steps=2, threads=1, disk=str(tmp_path))
    plain, streamed = (run(arm, 2, 700 * MIB, options) for arm in ("plain", "memwall"))
    assert plain.has_trained
    assert [step["loss"] for step in streamed.steps] == [step["loss"] for step in plain.steps]
    assert streamed.steps[-1]["disk_bytes"] >= 16 * 2 * 12 * 512 * 512
    assert list(tmp_path.iterdir()) == []
