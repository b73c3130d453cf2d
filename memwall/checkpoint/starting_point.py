"""The step that a process begins at, and how it is put there.

None, the last of its own, one that all ranks have, or one of another number of ranks.
"""

import logging

from torch import nn

from memwall.checkpoint.committed import Committed
from memwall.checkpoint.rank_folders import RankFolders
from memwall.checkpoint.redivision import redivided
from memwall.checkpoint.restoration import Restoration
from memwall.checkpoint.surroundings import Surroundings
from memwall.checkpoint.together import Together
from memwall.checkpoint.training_state import restore_random_states
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

    def enter_loop(self, beside: Surroundings, num_steps: int) -> int:
        """Puts the process where the last one was at the top of its loop, as far as it can be found.

        Returns:
            The iteration to begin with.

        Raises:
            UsageError: the checkpoint was made without something that the loop goes on with, or with something else.
        """
        if self.restoration is None:
            return 0
        saved = self.restoration.objects["loop"]
        begin = beside.loop.restore(saved, self._journal.directory)
        # A loop that has nothing left to do never calls its model, and then saves it.
        model = self.restoration.find_model(beside.variables)
        if model is None:
            beside.look_beside(None)
        else:
            self.restoration.restore_model(model)
            beside.look(model)
            if begin >= num_steps and beside.optimizers:
                self.restoration.restore_state(model, beside.optimizers, lambda _: None)
        restore_random_states(saved["random"])
        return begin

    def enter_forward(self, beside: Surroundings, model: nn.Module, *, was_asked: bool) -> nn.Module:
        """Puts the process where the last one was, from within the first forward of its model.

        Args:
            was_asked: whether the script has asked how many steps are done.

        Returns:
            The model, its parts in the order of the checkpoint.

        Raises:
            UsageError: the script would begin anew with its data.
            StoreError: the checkpoint is of another model.
        """
        assert self.restoration is not None
        if not was_asked:
            raise UsageError(
                f"the run in {self._journal.directory} has done {self.step} steps, but this script does not ask for "
                "that and would begin with its first batch again; loop over `for step in memwall.steps(NUM_STEPS)`, or "
                "begin at `memwall.resumed_steps()` and pass over the data of the steps before"
            )
        model = self.restoration.in_order(model, beside.variables)
        if self.restoration.model is None or {*self.restoration.model.parameters()} != {*model.parameters()}:
            self.restoration.restore_model(model)
        if not beside.loop.is_open:
            restore_random_states(self.restoration.objects["random"])
        return model

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
