"""Ranks continue from one step, whichever of them had committed one more when the run was killed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checkpoint_runs import NUM_STEPS, Script, run
from optimizer_runs import are_equal

from memwall.checkpoint.resumption import open_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.together import Together
from memwall.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


class Others:
    """Stands for the other ranks: says how far the slowest of them is."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.num_waits = 0

    def largest(self, values: Sequence[int], /) -> tuple[int, ...]:
        if len(values) == 1:
            self.num_waits += 1
            return tuple(values)
        return max(values[0], -self.step), max(values[1], self.step)

    def leave(self) -> None:
        self.step = -1


def killed(folder: Path, *, stop_in: int) -> int:
    """Returns the last step that a rank has committed."""
    run(lambda: Script(stop_in=stop_in), StepCheckpoint(folder, together=together(Others(0))))
    checkpoint = StepCheckpoint(folder, is_resuming=True)
    checkpoint.close(completed=False)
    return checkpoint.resumed_steps


def together(others: Others | None, every: int = 1) -> Together:
    return Together(lambda: others, num_ranks=2, every=every)


def test_a_rank_that_is_ahead_goes_back_a_step(tmp_path: Path) -> None:
    plain = run(Script)
    step = killed(tmp_path, stop_in=4)
    others = Others(step - 1)
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True, together=together(others))
    resumed = run(Script, checkpoint)
    assert checkpoint.resumed_steps == step - 1
    assert are_equal(plain.result, resumed.result)
    assert others.num_waits == NUM_STEPS - (step - 1)  # before each update
    assert others.step == -1  # left


def test_where_one_rank_has_no_step_yet_all_begin_anew(tmp_path: Path) -> None:
    plain = run(Script)
    assert killed(tmp_path, stop_in=1) == 1
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True, together=together(Others(0)))
    assert are_equal(plain.result, run(Script, checkpoint).result)
    assert checkpoint.resumed_steps == 0


def test_a_run_that_went_back_can_be_killed_again(tmp_path: Path) -> None:
    plain = run(Script)
    step = killed(tmp_path, stop_in=4)
    again = StepCheckpoint(tmp_path, is_resuming=True, together=together(Others(step - 1)))
    run(lambda: Script(stop_in=step), again)
    last = StepCheckpoint(tmp_path, is_resuming=True, together=together(Others(step)))
    assert are_equal(plain.result, run(Script, last).result)
    assert last.resumed_steps == step


def test_ranks_with_steps_too_far_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one rank has committed step 5, another only step 2, .* no step before 4"):
        together(Others(2)).common_step(5, str(tmp_path / "rank-0-of-2"))
    assert together(Others(2), every=3).common_step(5, str(tmp_path)) == 2


def test_ranks_agree_in_the_scripts_process_group(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"2 ranks go on from one step.*init_process_group before memwall\.steps"):
        together(None).common_step(5, str(tmp_path / "rank-0-of-2"))


def meets_nobody() -> None:
    return None


@pytest.fixture
def rank_1_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def of(num_ranks: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        monkeypatch.setenv("RANK", "1")

    return of


def test_each_rank_has_a_folder_and_their_number_stays(tmp_path: Path, rank_1_of: Callable[[int], None]) -> None:
    rank_1_of(2)
    checkpoint = open_checkpoint(tmp_path, every=1, is_resuming=False, meet=meets_nobody)
    checkpoint.close(completed=False)
    assert checkpoint.directory == str(tmp_path / "rank-1-of-2")
    rank_1_of(3)
    with pytest.raises(UsageError, match=r"holds a run of 2 ranks, and this is one of 3 ranks"):
        open_checkpoint(tmp_path, every=1, is_resuming=True, meet=meets_nobody)
    rank_1_of(1)
    with pytest.raises(UsageError, match=r"holds a run of 2 ranks, and this process trains alone"):
        open_checkpoint(tmp_path, every=1, is_resuming=True, meet=meets_nobody)


def test_a_folder_of_one_process_is_not_that_of_ranks(tmp_path: Path, rank_1_of: Callable[[int], None]) -> None:
    run(lambda: Script(stop_in=2), StepCheckpoint(tmp_path))
    rank_1_of(2)
    with pytest.raises(UsageError, match=r"holds a run of one process, and this is one of 2 ranks"):
        open_checkpoint(tmp_path, every=1, is_resuming=True, meet=meets_nobody)
