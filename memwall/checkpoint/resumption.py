"""Tells a training loop that can be resumed where to begin: in a script that memwall does not run, at 0."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from memwall.apply.optimizer_state.kept_space import set_kept_space
from memwall.checkpoint.rank_folders import folder_of_rank, other_ranks
from memwall.checkpoint.reachable import set_caller
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.together import Meeting, Together
from memwall.machine.launched import launched

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Can be taken down and continued, as torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any:
        """Returns what to continue from."""

    def load_state_dict(self, state: Any, /) -> object:
        """Continues."""


_present: StepCheckpoint | None = None


def set_checkpoint(checkpoint: StepCheckpoint | None) -> None:
    """Says which checkpoint the loops of this process ask, in a script that the calling function runs."""
    global _present
    _present = checkpoint
    set_caller(None if checkpoint is None else sys._getframe(1))
    set_kept_space(None if checkpoint is None else checkpoint.space)


def resumed_steps() -> int:
    """Returns the optimizer steps that the run had committed when this process began: 0 in a new run.

    Example::

        for step in range(memwall.resumed_steps(), num_steps):
            batch = batch_of(step)

    Exact where the data of a step do not depend on random numbers that steps before it have drawn. Where they do, loop
    over `memwall.steps`.
    """
    return 0 if _present is None else _present.ask()


def steps(num_steps: int, **stateful: Stateful) -> Iterator[int]:
    """Yields numbers of iterations up to `num_steps`, from the one that a resumed run has to do next.

    Random numbers, and what is passed by name, are as they were at the beginning of that iteration: bit-equal to the
    run without interruption, as long as each iteration draws its batch in its own body.

    Example::

        for step, batch in zip(memwall.steps(num_steps, loader=loader), loader):

    Args:
        num_steps: of the whole run.
        stateful: what the loop goes on with, with `state_dict` and `load_state_dict`.
    """
    checkpoint = _present
    if checkpoint is None:
        yield from range(num_steps)
        return
    begin = checkpoint.enter_loop(num_steps, dict(stateful))
    for number in range(begin, num_steps):
        yield number
        checkpoint.at_loop_top(number + 1)


def open_checkpoint(
    directory: str | os.PathLike[str], *, every: int, is_resuming: bool, meet: Callable[[], Meeting | None]
) -> StepCheckpoint:
    """Opens a `StepCheckpoint` for this process; for one of several ranks, in a folder of its own below the directory.

    Args:
        meet: makes what ranks agree by, once the script has a process group.

    Raises:
        UsageError: the directory is of another number of ranks, and not to be continued; or as `StepCheckpoint` does.
        StoreError: as `StepCheckpoint` does.
    """
    here = launched()
    others = other_ranks(directory, here.num_ranks, is_resuming=is_resuming)
    checkpoint = StepCheckpoint(
        folder_of_rank(directory, here.rank, here.num_ranks),
        every=every,
        is_resuming=is_resuming,
        together=Together(meet, num_ranks=here.num_ranks) if here.num_ranks > 1 else None,
        others=others,
        rank=here.rank,
    )
    checkpoint.run_directory = os.path.abspath(directory)
    if is_resuming and checkpoint.is_new:
        _log.warning(
            "--resume: %s holds no committed step yet; this run begins at step 0; if there should be "
            "one, check the folder",
            checkpoint.directory,
        )
    return checkpoint
