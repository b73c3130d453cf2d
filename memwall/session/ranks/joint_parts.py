"""Runs parts of a step so that no rank waits for one that fails in them: all do the step again, or none does.

Under DistributedDataParallel a part runs forward and backward without the others, so that it may fail on one rank.
Then all say whether it has, by one number, and only where none has, gradients are averaged, once. That is later than
beside backward. Under FSDP2 all say so before each collective of a unit as well. Only parts run so in which memory may
run out, for all that is known: the first ones under a plan, and those of larger batches than have run under it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from torch import nn

from memwall.apply.memory.exhaustion import Exhaustion, Phase
from memwall.errors import RankError
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.divided import Divided, divided_as
from memwall.trace.records import Trace

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NUM_CAREFUL = 8
"""Parts under a plan after which it has shown what it needs: optimizer state and buckets are there by then."""
_NUM_SHAPES = 64
"""Batches remembered, of which none is as large as another; data of more kinds of lengths is not told apart."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors; () where they are not known."""


class Told(Struct, frozen=True, kw_only=True):
    """Holds what a rank says of a part that has failed, on it or on another one."""

    plan_hash: str
    has_failed: bool
    phase: Phase | None = None
    """The part of the step in which memory ran out; None where it did not, on this rank."""
    asked_bytes: int = 0
    held_bytes: int = 0
    ends: str = ""
    """Why this rank cannot do the step again; empty where it can."""


class FailedStepError(Exception):
    """Says that all ranks do the step again, because memory ran out on one of them.

    Attributes:
        found: what was lacking where memory ran out: the most that was asked for, the least that was held.
        where: names one of them.
        has_failed_here: whether it ran out on this rank, too.
    """

    def __init__(self, found: Exhaustion, where: str, *, has_failed_here: bool) -> None:
        super().__init__(where)
        self.found, self.where, self.has_failed_here = found, where, has_failed_here


class _FailedElsewhereError(Exception):
    """Ends a part on a rank that could go on."""


Tell = Callable[[Exception | None], tuple[Told, Exception | None]]
"""Tells what a failure on this rank, or None, means for the step, and with what error this rank ends for it."""


class JointParts:
    """Runs parts of steps of one model on all ranks alike."""

    def __init__(self, ranks: Ranks, divided: Divided) -> None:
        self._ranks, self._divided = ranks, divided
        self.begin, self.reset = divided.begin, divided.reset
        self._plan_hash = ""
        self._num_run = 0
        self._has_heard = False
        """Whether another rank has failed in the part that runs, even where the script has caught what said so."""
        self._are_uneven = False
        """Whether ranks have divided a step into parts unlike each other: then nobody waits for another one's part."""
        self._tried: list[Shapes] = []
        """Batches that have run under the plan: those to which no other one is at least equal in each dimension."""

    @classmethod
    def of(cls, ranks: Ranks, model: nn.Module, trace: Trace) -> "JointParts | None":
        """Returns what runs a model's parts; None where ranks wait for each other in ways that it does not know.

        All of them have to know: one may still hold a DistributedDataParallel that another one has let go of.
        """
        divided = divided_as(model, trace)
        is_unknown = any(ranks.largest((int(divided is None),)))
        return None if divided is None or is_unknown else cls(ranks, divided)

    def are_careful(self, shapes: Shapes, plan_hash: str, begin: Any) -> bool:
        """Agrees with the other ranks whether memory may run out in the next part, so that `run` has to run it.

        Where a rank accumulates gradients in a part in which another one reduces them already, it has more parts, and
        they agree on nothing from then on: one would wait here, and one in its backward.
        """
        if self._are_uneven:
            return False
        if plan_hash != self._plan_hash:
            self._plan_hash, self._num_run, self._tried = plan_hash, 0, []
        is_known = self._num_run >= _NUM_CAREFUL and any(_covers(tried, shapes) for tried in self._tried)
        reduces = self._divided.reduces(begin)
        is_careful, is_last, goes_on = map(bool, self._ranks.largest((not is_known, reduces, not reduces)))
        self._are_uneven = is_last and goes_on
        if self._are_uneven:
            _log.warning("ranks accumulate over unlike numbers of batches; none does a step again from now on")
        return is_careful and not self._are_uneven

    def run(self, part: Callable[[], _T], shapes: Shapes, begin: Any, tell: Tell) -> _T:
        """Runs a part on all ranks, or finds that one of them cannot.

        Args:
            part: runs forward and backward.
            shapes: of its batch.
            begin: how the part began when it ran first.
            tell: says what a failure means.

        Raises:
            FailedStepError: all of them do the step again.
            RankError: another rank cannot go on.
            Exception: what the part raised here, where that is no lack of memory, or ends the run.
        """
        self._has_heard = False
        try:
            result = self._divided.run(part, begin, self._meet)
            self._meet()
        except RankError:
            raise
        except _FailedElsewhereError as error:
            raise self._agreed(*tell(None)) from error
        except Exception as error:
            told, ends = tell(error)
            self._ranks.largest((1,))
            outcome = self._agreed(told, ends)
            if outcome is error:
                raise
            raise outcome from error
        self._divided.end(begin)
        self._note(shapes)
        return result

    def _note(self, shapes: Shapes) -> None:
        self._num_run += 1
        if shapes and not any(_covers(tried, shapes) for tried in self._tried):
            self._tried = [tried for tried in self._tried if not _covers(shapes, tried)][1 - _NUM_SHAPES :]
            self._tried.append(shapes)

    def _meet(self) -> None:
        self._has_heard = self._has_heard or any(self._ranks.largest((0,)))
        if self._has_heard:
            raise _FailedElsewhereError

    def _agreed(self, told: Told, ends: Exception | None) -> Exception:
        said = [msgspec.json.decode(each, type=Told) for each in self._ranks.gathered(msgspec.json.encode(told))]
        return ends or _outcome(said, has_failed_here=told.has_failed)


def _covers(one: Shapes, other: Shapes) -> bool:
    """Returns whether a batch is at least as large as another one in each dimension of each tensor."""
    if len(one) != len(other) or any(len(ours) != len(theirs) for ours, theirs in zip(one, other, strict=True)):
        return False
    return all(a >= b for ours, theirs in zip(one, other, strict=True) for a, b in zip(ours, theirs, strict=True))


def _outcome(said: Sequence[Told], *, has_failed_here: bool) -> Exception:
    """Returns what a rank that could go on raises, by what all say."""
    num_ranks, failed = len(said), [rank for rank, told in enumerate(said) if told.has_failed]
    ended = [*(rank for rank in failed if said[rank].ends), *(rank for rank, told in enumerate(said) if told.ends)]
    if ended and said[ended[0]].has_failed:
        return RankError(
            f"rank {ended[0]} of {num_ranks} ended its run in this step, and no rank can train on alone: "
            f"{said[ended[0]].ends}"
        )
    reason = f"rank {ended[0]} cannot: {said[ended[0]].ends}" if ended else ""
    if len({told.plan_hash for told in said}) > 1:
        reason = "ranks train unlike models, each kind by a plan of its own"
    if reason:
        return RankError(f"rank {failed[0]} of {num_ranks} ran out of memory, and no step is done again: {reason}")
    found = Exhaustion(
        phase=said[failed[0]].phase or "forward",
        asked_bytes=max(said[rank].asked_bytes for rank in failed),
        held_bytes=min(said[rank].held_bytes for rank in failed),
    )
    return FailedStepError(found, f" on rank {failed[0]} of {num_ranks}", has_failed_here=has_failed_here)
