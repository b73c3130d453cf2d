"""Folders that the ranks of a run commit into, and which of them a run goes on from when their number changes.

One process commits into the folder that the user names; of several each into `rank-0-of-8` below it. Another number of
ranks reads the folders of the last one, commits into folders of its own, and deletes those it came from once all of its
ranks have a step there: whenever it is killed, one complete set of folders is left.
"""

import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from memwall.checkpoint.committed import Committed
from memwall.errors import UsageError
from memwall.store.commit_format import COMMIT_NAME, DATA_NAME
from memwall.store.journal import Journal, is_begun, recorded_steps

_log = logging.getLogger(__name__)
_ALONE = 1


def folder_of_rank(directory: str | os.PathLike[str], rank: int, num_ranks: int) -> Path:
    """Returns where a rank commits its steps."""
    return Path(directory) if num_ranks == _ALONE else Path(directory) / f"rank-{rank}-of-{num_ranks}"


class RankFolders:
    """Finds what all ranks of a run have committed, and reads it once it is opened.

    Args:
        directory: of the run.
        num_ranks: how many it had.

    Attributes:
        step: the last step that all of them have, by their records; 0 where there is none.
        missing: names of the folders that are not there.
        newest: the last step that any of them has; 0 where there is none.
        committed: that step, by rank, once opened.

    Raises:
        StoreError: a folder's records cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], num_ranks: int) -> None:
        self.directory, self.num_ranks = Path(directory), num_ranks
        self.paths = [folder_of_rank(directory, rank, num_ranks) for rank in range(num_ranks)]
        self.missing = [path.name for path in self.paths if not path.is_dir()]
        # Without a lock: other ranks may be opening theirs. None of them commits before all are there.
        steps = [max(recorded_steps(os.fspath(path)), default=0) for path in self.paths]
        self.step, self.newest = min(steps), max(steps)
        self.committed: list[Committed] = []
        self._journals: list[Journal] = []

    def open(self) -> None:
        """Verifies and decodes the step.

        Raises:
            UsageError: there is none.
            StoreError: a folder is damaged, or a run is using it.
        """
        if self.missing or not all(is_begun(os.fspath(path)) for path in self.paths):
            raise self._without_step()
        try:
            for path in self.paths:
                self._journals.append(Journal(path, is_read_only=True))
            self.step = min(0 if journal.last is None else journal.last.step for journal in self._journals)
            for journal in self._journals:
                last = journal.last
                found = last if last is not None and last.step == self.step else journal.go_back_to(self.step)
                if found is None:
                    raise self._without_step()
                self.committed.append(Committed(journal, found))
        except BaseException:
            self.close()
            raise

    def _without_step(self) -> UsageError:
        return UsageError(f"{self.directory} holds no committed step; expected one written by memwall run --checkpoint")

    @property
    def recovery_seconds(self) -> float:
        """Returns how long it took to find the step, and to read and verify all of it."""
        return sum(journal.recovery_seconds for journal in self._journals)

    def close(self) -> None:
        """Lets go of the folders; safe to call twice."""
        journals, self._journals = self._journals, []
        for journal in journals:
            journal.close()

    def leave(self, num_ranks: int) -> None:
        """Deletes all folders but those of so many ranks, who all have a step by now.

        What cannot be deleted is left and told.
        """
        self.close()
        for other in _numbers_of_ranks(self.directory):
            for rank in range(other) if other != num_ranks else ():
                _remove(folder_of_rank(self.directory, rank, other), is_shared=other == _ALONE)


def last_folders(directory: str | os.PathLike[str]) -> RankFolders | None:
    """Returns the folders with the last step that all their ranks have; None where there is none.

    Raises:
        UsageError: some ranks have later steps, and the folders of others are not here.
    """
    every = [RankFolders(directory, num_ranks) for num_ranks in _numbers_of_ranks(Path(directory))]
    best = max(every, key=lambda found: found.step, default=None)
    step = 0 if best is None else best.step
    for found in every:
        if found.missing and found.newest > step:
            raise UsageError(
                f"{directory} has steps of a run of {found.num_ranks} ranks, but not the folders "
                f"{', '.join(found.missing[:4])}, without which none of its steps is whole: the newest is step "
                f"{found.newest}, and the last whole one of any run there is step {step}; copy the folders of all "
                f"hosts there, or delete rank-*-of-{found.num_ranks} to go on from step {step}"
            )
    return best if step else None


def other_ranks(directory: str | os.PathLike[str], num_ranks: int, *, is_resuming: bool) -> RankFolders | None:
    """Returns the folders that this run goes on from where the directory has some of another number of ranks.

    Those of another number are opened; the run's own are not. Nothing is deleted. None where there are no others.

    Raises:
        UsageError: the folder is of another number of ranks, and is not to be continued.
        StoreError: a folder is damaged, or a run is using it.
    """
    others = [number for number in _numbers_of_ranks(Path(directory)) if number != num_ranks]
    if not others:
        return None
    if not is_resuming:
        made_by = " and ".join("one process" if number == _ALONE else f"{number} ranks" for number in others)
        this = "is one process" if num_ranks == _ALONE else f"is one of {num_ranks} ranks"
        raise UsageError(
            f"--checkpoint {directory} holds a run of {made_by}, and this {this}; continue it with --resume, or give "
            "this run a directory of its own"
        )
    found = last_folders(directory)
    if found is not None and found.num_ranks != num_ranks:
        found.open()
    return found


def _numbers_of_ranks(directory: Path) -> Sequence[int]:
    """Returns of how many ranks there are folders, the runs of one process among them."""
    names = [match for match in map(_RANK.fullmatch, _names(directory)) if match is not None]
    alone = {_ALONE} if directory.is_dir() and is_begun(os.fspath(directory)) else set()
    return sorted({int(match.group(1)) for match in names} | alone)


_RANK = re.compile(r"rank-\d+-of-(\d+)")


def _names(directory: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(directory)
    return []


def _remove(folder: Path, *, is_shared: bool) -> None:
    """Deletes what a rank has committed: its name first, so that no half of it is found.

    Args:
        is_shared: whether the folder has those of other ranks in it.
    """
    names = (COMMIT_NAME, DATA_NAME) if is_shared else ("",)
    trash = folder / ".removed" if is_shared else folder.with_name(f".removed-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    try:
        if is_shared:
            trash.mkdir(exist_ok=True)
        for name in names:
            with suppress(FileNotFoundError):
                os.replace(folder / name, trash / name)
        shutil.rmtree(trash)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s is of no use any more, and cannot be deleted: %s", folder, error)
