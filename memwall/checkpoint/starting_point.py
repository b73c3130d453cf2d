"""The step that a process begins at: none, the last of its own, one that all ranks have, or one of another number."""

import logging

from memwall.checkpoint.committed import Committed
from memwall.checkpoint.rank_folders import RankFolders
from memwall.checkpoint.redivision import redivided
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.together import Together
from memwall.errors import StoreError, UsageError
from memwall.store.journal import Journal

_log = logging.getLogger(__name__)


class StartingPoint:
    """Finds where a process begins, and keeps its place among the ranks while they go on.

    Args:
        journal: of this process.
        is_resuming: whether to continue from what is in it.
        together: what agrees with the other ranks of a run; None of a process that trains alone.
        rank: of this process among them.
        others: what this run goes on from beside folders of another number of ranks: theirs, opened, or its own.

    Attributes:
        step: how many steps were done by then.
        restoration: puts the step back; None where nothing was committed.
        recovered_bytes, recovery_seconds: of what was committed, all of which was read and verified.

    Raises:
        UsageError: the journal holds a run, and this one is not to continue it.
        StoreError: what was committed cannot be read.
    """

    def __init__(
        self, journal: Journal, *, is_resuming: bool, together: Together | None, rank: int, others: RankFolders | None
    ) -> None:
        self._journal, self._together, self._rank, self._others = journal, together, rank, others
        self._num_ranks = 1 if together is None else together.num_ranks
        self.is_agreed = together is None and not (others is not None and others.committed)
        self.recovery_seconds = journal.recovery_seconds
        self.restoration: Restoration | None = None
        found: list[Committed] = []
        if others is not None and others.committed:
            found = others.committed
            self.restoration = redivided(found, rank, self._num_ranks)
            self.recovery_seconds += others.recovery_seconds
        elif journal.last is not None:
            if not is_resuming:
                raise UsageError(
                    f"--checkpoint {journal.directory} holds step {journal.last.step} of a run; continue it with "
                    "--resume, or give this run a directory of its own"
                )
            found = [Committed(journal, journal.last)]
            self.restoration = Restoration(found)
        self.step = found[0].step if found else 0
        self.recovered_bytes = sum(committed.num_bytes for committed in found)

    def agree(self) -> None:
        """Goes back to the last step that all ranks have committed; of a process alone, stays where it is.

        What this process has of an earlier time, when as many ranks trained, is forgotten where all go on from others.

        Raises:
            MemwallError: see `Together.common_step`, and the errors of a disk.
        """
        if self.is_agreed:
            return
        if self._together is not None:
            self._together.common_step(self.step, self._go_back_to, self._journal.directory)
        self.is_agreed = True
        if self._others is not None and self._others.committed and self._journal.last is not None:
            self._journal.forget()

    def _go_back_to(self, step: int) -> None:
        if self._others is not None and self._others.committed:
            raise StoreError(
                f"rank {self._rank} found step {self.step} of a run of {self._others.num_ranks} ranks in "
                f"{self._others.directory}: not all hosts see the same folders there"
            )
        found = self._journal.go_back_to(step)
        self.restoration = None if found is None else Restoration([Committed(self._journal, found)])
        self.step = step
        _log.info(
            "%s: continuing from step %d, the last one that all ranks have committed", self._journal.directory, step
        )

    def wait_for_all(self, step: int) -> None:
        """Returns once all ranks have their last commit on disk: what was before it may be written over from now on.

        Args:
            step: this rank's last one.

        Raises:
            RankError: a rank is missing.
        """
        if self._together is not None:
            step = self._together.wait(step, self._journal.directory)
        others = self._others
        if others is not None and step > self.step:  # all have one of their own
            self._others = None
            others.leave(self._num_ranks) if self._rank == 0 else others.close()

    def close(self) -> None:
        """Lets go of other folders and other ranks; safe to call twice."""
        if self._others is not None:
            self._others.close()
        if self._together is not None:
            self._together.leave()
