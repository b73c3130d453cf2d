"""Ranks continue from one step, whichever of them had committed one more when the run was killed."""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import NUM_STEPS, Script, run
from optimizer_runs import are_equal

from memwall.checkpoint.resumption import open_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.together import Together
from memwall.cli.app import main
from memwall.errors import StoreError, UsageError
from memwall.store.journal import recorded_steps

pytestmark = pytest.mark.usefixtures("one_thread")


class Others:
    """Stands for the other ranks: says how far the slowest of them is, and whether one lacks the step agreed on."""

    def __init__(self, step: int, *, lacks: bool = False) -> None:
        self.step, self.lacks = step, lacks
        self.num_waits = -1  # once they say whether they have it

    def largest(self, values: Sequence[int], /) -> tuple[int, ...]:
        if len(values) == 1:
            self.num_waits += 1
            return (max(values[0], int(self.lacks)) if values[0] >= 0 else values[0],)  # as far as this one
        return max(values[0], -self.step), max(values[1], self.step)

    def leave(self) -> None:
        self.step = -1


def killed(folder: Path, *, stop_in: int, every: int = 1) -> int:
    """Returns the last step that a rank has committed."""
    run(lambda: Script(stop_in=stop_in), StepCheckpoint(folder, every=every, together=together(Others(0))))
    checkpoint = StepCheckpoint(folder, is_resuming=True)
    checkpoint.close(completed=False)
    return checkpoint.resumed_steps


def together(others: Others | None) -> Together:
    return Together(lambda: others, num_ranks=2)


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


def test_a_rank_goes_back_to_what_it_has_though_commits_are_to_be_closer_now(tmp_path: Path) -> None:
    """GIVEN commits two steps apart WHEN they are to be one apart from now on THEN the one before is still there."""
    plain = run(Script)
    step = killed(tmp_path, stop_in=4, every=2)
    checkpoint = StepCheckpoint(tmp_path, every=1, is_resuming=True, together=together(Others(step - 2)))
    assert are_equal(plain.result, run(Script, checkpoint).result)
    assert checkpoint.resumed_steps == step - 2 > 0


@pytest.mark.parametrize("missing", [0, 1])
def test_ranks_with_steps_too_far_apart_are_refused(tmp_path: Path, missing: int) -> None:
    step = killed(tmp_path, stop_in=4)
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True, together=together(Others(missing)))
    said = rf"one rank has committed step {step}, another only step {missing}, and .* has no step {missing} any more"
    with pytest.raises(UsageError, match=said):
        checkpoint.ask()
    checkpoint.close(completed=False)


def test_what_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    """GIVEN a rank that is there already WHEN another one cannot go back THEN neither goes on."""
    with pytest.raises(UsageError, match="another only step 2, and a rank that is ahead cannot go back to that"):
        together(Others(2, lacks=True)).common_step(2, lambda _: None, str(tmp_path / "rank-0-of-2"))


def test_ranks_agree_in_the_scripts_process_group(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"2 ranks go on from one step.*init_process_group before memwall\.steps"):
        together(None).common_step(5, lambda _: None, str(tmp_path / "rank-0-of-2"))


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def of(rank: int, num_ranks: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        monkeypatch.setenv("RANK", str(rank))

    return of


def opened(folder: Path, others: Others | None, *, is_resuming: bool = True) -> StepCheckpoint:
    return open_checkpoint(folder, every=1, is_resuming=is_resuming, meet=lambda: others)


def test_each_rank_has_a_folder(tmp_path: Path, rank_of: Callable[[int, int], None]) -> None:
    rank_of(1, 2)
    checkpoint = opened(tmp_path, None, is_resuming=False)
    checkpoint.close(completed=False)
    assert checkpoint.directory == str(tmp_path / "rank-1-of-2")
    assert checkpoint.run_directory == str(tmp_path)


class OfRank(Script):
    """Draws other random numbers than other ranks."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(rank)


def two_ranks(folder: Path, script: Callable[[int], Script]) -> None:
    """GIVEN two ranks that were killed when one had committed step 4 and the other step 3."""
    for rank, steps in ((0, 4), (1, 3)):
        made = functools.partial(script, rank)
        made.keywords["stop_in"] = steps  # type: ignore[index]
        run(made, StepCheckpoint(folder / f"rank-{rank}-of-2", together=together(Others(0))))


def alike(_: int, **options: Any) -> Script:
    return Script(**options)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (2, 3)])
def test_another_number_of_ranks_goes_on(
    tmp_path: Path, rank: int, num_ranks: int, rank_of: Callable[[int, int], None]
) -> None:
    """GIVEN ranks with the same batches THEN each of another number ends as one that nobody ended."""
    plain = run(Script)
    two_ranks(tmp_path, alike)
    for other in range(num_ranks) if num_ranks > 1 else ():
        (tmp_path / f"rank-{other}-of-{num_ranks}").mkdir()
    rank_of(rank, num_ranks)
    checkpoint = opened(tmp_path, Others(3) if num_ranks > 1 else None)
    assert checkpoint.resumed_steps == 3
    assert are_equal(plain.result, run(Script, checkpoint).result)
    assert main(["checkpoint", str(tmp_path)]) == 0


def test_a_new_rank_draws_numbers_of_its_own(
    tmp_path: Path, rank_of: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    two_ranks(tmp_path, OfRank)
    rank_of(2, 3)
    checkpoint = opened(tmp_path, Others(3))
    checkpoint.close(completed=False)
    assert "rank 2 is new and begins anew with random numbers of torch, which the ranks" in caplog.text


def test_what_another_number_came_from_is_left_until_all_have_a_step(
    tmp_path: Path, rank_of: Callable[[int, int], None]
) -> None:
    """GIVEN one of three ranks with a step of its own, others without THEN they resume from what two ranks had."""
    two_ranks(tmp_path, alike)
    run(lambda: Script(stop_in=5), StepCheckpoint(tmp_path / "rank-0-of-3", together=together(Others(0))))
    (tmp_path / "rank-1-of-3").mkdir()
    (tmp_path / "rank-2-of-3").mkdir()
    rank_of(0, 3)
    checkpoint = opened(tmp_path, Others(3))
    assert checkpoint.resumed_steps == 3
    run(lambda: Script(stop_in=3), checkpoint)
    assert (tmp_path / "rank-0-of-2").exists()
    run(Script, opened(tmp_path, Others(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank-{rank}-of-3" for rank in range(3)]


def test_what_is_of_another_number_of_ranks_is_not_begun_anew(
    tmp_path: Path, rank_of: Callable[[int, int], None]
) -> None:
    two_ranks(tmp_path, alike)
    rank_of(1, 3)
    with pytest.raises(UsageError, match=r"holds a run of 2 ranks, and this is one of 3 ranks; continue it with --res"):
        opened(tmp_path, None, is_resuming=False)
    shutil.rmtree(tmp_path / "rank-1-of-2")
    with pytest.raises(UsageError, match="has steps of a run of 2 ranks, but not the folders rank-1-of-2"):
        opened(tmp_path, None)


def test_ranks_go_on_from_one_process(tmp_path: Path, rank_of: Callable[[int, int], None]) -> None:
    plain = run(Script)
    run(lambda: Script(stop_in=3), StepCheckpoint(tmp_path))
    rank_of(1, 2)
    with pytest.raises(UsageError, match=r"holds a run of one process, and this is one of 2 ranks"):
        opened(tmp_path, None, is_resuming=False)
    others = Others(3)
    assert are_equal(plain.result, run(Script, opened(tmp_path, others)).result)


def step_of(folder: Path) -> int:
    return max(recorded_steps(str(folder)), default=0)


def of_ranks(folder: Path, num_ranks: int, steps: int) -> None:
    """GIVEN so many ranks that have all committed this step."""
    for rank in range(num_ranks):
        committing = StepCheckpoint(folder / f"rank-{rank}-of-{num_ranks}", together=together(Others(0)))
        run(lambda: Script(stop_in=steps), committing)


def test_later_steps_that_lack_a_folder_are_not_gone_back_from(
    tmp_path: Path, rank_of: Callable[[int, int], None]
) -> None:
    """GIVEN three ranks at step 4, the folder of one lost AND two ranks at step 2 THEN nothing goes on from step 2."""
    of_ranks(tmp_path, 2, 2)
    of_ranks(tmp_path, 3, 4)
    shutil.rmtree(tmp_path / "rank-1-of-3")
    rank_of(0, 3)
    said = r"3 ranks, but not the folders rank-1-of-3.*the newest is step 4, and the last whole one .* is step 2"
    with pytest.raises(UsageError, match=said):
        opened(tmp_path, Others(4))
    assert step_of(tmp_path / "rank-0-of-3") == 4


def test_what_a_rank_has_is_kept_until_all_agree_to_go_on_from_others(
    tmp_path: Path, rank_of: Callable[[int, int], None]
) -> None:
    """GIVEN two ranks at step 2 and three at step 4, of which one is damaged, or not seen by all hosts."""
    plain = run(Script)
    of_ranks(tmp_path, 2, 2)
    of_ranks(tmp_path, 3, 4)
    rank_of(0, 2)
    elsewhere = opened(tmp_path, Others(2))
    with pytest.raises(UsageError, match=r"rank 0 found step 4 of a run of 3 ranks in .*: not all hosts see the same"):
        elsewhere.ask()
    elsewhere.close(completed=False)
    assert step_of(tmp_path / "rank-0-of-2") == 2
    for_later = tmp_path.parent / f"{tmp_path.name}-copy"
    shutil.copytree(tmp_path, for_later)
    (tmp_path / "rank-1-of-3" / "memwall.data").write_bytes(b"")
    with pytest.raises(StoreError, match="rank-1-of-3"):
        opened(tmp_path, Others(4))
    assert step_of(tmp_path / "rank-0-of-2") == 2
    assert are_equal(plain.result, run(Script, opened(for_later, Others(4))).result)
    assert step_of(for_later / "rank-0-of-2") == NUM_STEPS


def test_older_steps_of_another_number_are_deleted(tmp_path: Path, rank_of: Callable[[int, int], None]) -> None:
    plain = run(Script)
    of_ranks(tmp_path, 3, 2)
    of_ranks(tmp_path, 2, 3)
    rank_of(0, 2)
    checkpoint = opened(tmp_path, Others(3))
    assert checkpoint.resumed_steps == 3
    assert are_equal(plain.result, run(Script, checkpoint).result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
