"""Has the ranks of a run continue from one step, and none of them go further than one commit ahead of the others.

Each rank commits into a folder of its own. A step counts when all have committed it: before each update every rank
waits until all have. So their last commits differ by one at most, whenever they end, and each still has the one before.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from memwall.errors import StoreError, UsageError


class Meeting(Protocol):
    """Lets ranks agree on numbers; see `memwall.session.ranks.agreement.Ranks`."""

    def largest(self, values: Sequence[int], /) -> tuple[int, ...]:
        """Returns the largest of all ranks, number by number."""

    def leave(self) -> None:
        """Ends it."""


class Together:
    """Agrees with the other ranks of a run on its steps.

    Args:
        meet: makes the meeting, on all ranks alike; None where the script has no process group yet.
        num_ranks: how many there are.
    """

    def __init__(self, meet: Callable[[], Meeting | None], *, num_ranks: int) -> None:
        self._meet, self.num_ranks = meet, num_ranks
        self._meeting: Meeting | None = None

    def common_step(self, own_step: int, go_back_to: Callable[[int], None], directory: str) -> int:
        """Returns the last step that all ranks have committed, once each of them is there.

        Args:
            own_step: the last one of this rank; 0 for none.
            go_back_to: has this rank continue from an earlier step, if it still has it.
            directory: of this rank, for an error.

        Raises:
            UsageError: there is no process group yet, or a rank has lost a step that the others need: on all alike.
            RankError: a rank is missing.
        """
        meeting = self._met(directory)
        negated, most = meeting.largest((-own_step, own_step))
        least, lack = -negated, None
        try:
            if least != own_step:
                go_back_to(least)
        except StoreError as error:
            lack = error
        (is_lacking,) = meeting.largest((int(lack is not None),))
        if is_lacking:
            raise UsageError(
                f"--checkpoint {os.path.dirname(directory)}: one rank has committed step {most}, another only step "
                f"{least}, and {lack or 'a rank that is ahead cannot go back to that'}; restore the folders of all "
                "ranks from one copy, or begin anew with another --checkpoint DIR"
            ) from lack
        return least

    def wait(self, step: int, directory: str) -> int:
        """Returns the last step that all ranks have on disk, once all of them have come here.

        Args:
            step: the last one of this rank.
            directory: of this rank, for an error.

        Raises:
            RankError: a rank is missing.
        """
        (negated,) = self._met(directory).largest((-step,))
        return -negated

    def leave(self) -> None:
        """Closes the meeting; safe to call twice."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.leave()

    def _met(self, directory: str) -> Meeting:
        if self._meeting is None:
            self._meeting = self._meet()
        if self._meeting is None:
            raise UsageError(
                f"--checkpoint {os.path.dirname(directory)}: {self.num_ranks} ranks go on from one step, on which "
                "they agree in the script's process group; call torch.distributed.init_process_group before "
                "memwall.steps"
            )
        return self._meeting
