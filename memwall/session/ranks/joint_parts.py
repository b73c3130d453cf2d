"""Runs parts of a step so that no rank waits for one that fails in them: all do the step again, or none does.

Under DistributedDataParallel a part runs forward and backward without the others, so that it may fail on one rank.
Then all say whether it has, by one number, and only where none has, gradients are averaged, once. That is later than
beside backward, so that only parts run so in which memory may run out, for all that is known: the first ones under a
plan, and those of larger batches than have run under it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memwall.apply.memory.exhaustion import Exhaustion, Phase
from memwall.checkpoint.discovery import objects_of
from memwall.errors import RankError
from memwall.session.ranks.agreement import Ranks
from memwall.torch_internals.reducer import is_reducible, meet_before_forward, reduce_gradients
from memwall.trace.records import Trace

_T = TypeVar("_T")

_OF_ITS_OWN = ("c10d.broadcast_",)
"""Collectives in a forward that are those of DistributedDataParallel: it makes buffers equal."""
_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_NUM_CAREFUL = 8
"""Parts under a plan after which it has shown what it needs: optimizer state and buckets are there by then."""
_NUM_SHAPES = 64
"""Batches remembered, of which none is as large as another; data of more kinds of lengths is not told apart."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors; () where they are not known."""


class PartBegin(NamedTuple):
    """Says how a part began: its loop may reduce gradients with another part."""

    is_reduced: bool
    makes_buffers_equal: bool


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
    """

    def __init__(self, found: Exhaustion, where: str) -> None:
        super().__init__(where)
        self.found, self.where = found, where


Tell = Callable[[Exception | None], tuple[Told, Exception | None]]
"""Tells what a failure on this rank, or None, means for the step, and with what error this rank ends for it."""


class JointParts:
    """Runs parts of steps of one model in DistributedDataParallel, on all ranks alike."""

    def __init__(self, ranks: Ranks, parallel: DistributedDataParallel) -> None:
        self._ranks = ranks
        self._parallel = weakref.ref(parallel)
        self._plan_hash = ""
        self._num_run = 0
        self._tried: list[Shapes] = []
        """Batches that have run under the plan: those to which no other one is at least equal in each dimension."""

    @classmethod
    def of(cls, ranks: Ranks, model: nn.Module, trace: Trace) -> "JointParts | None":
        """Returns what runs a model's parts; None where ranks wait for each other in ways that it does not know."""
        names = {trace.names[op.name] for step in trace.steps for op in step.ops if op.phase == "forward"}
        if any(not name.startswith(_OF_ITS_OWN) for name in names if name.startswith(_COLLECTIVES)):
            return None
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        around = [
            parallel
            for parallel in objects_of((DistributedDataParallel,))
            if trained & {id(parameter) for parameter in parallel.parameters()}
        ]
        if len(around) != 1 or not is_reducible(around[0]):
            return None
        covered = {id(parameter) for parameter in around[0].parameters()}
        return cls(ranks, around[0]) if trained <= covered else None

    def are_careful(self, shapes: Shapes, plan_hash: str) -> bool:
        """Agrees with the other ranks whether memory may run out in the next part, so that `run` has to run it."""
        if plan_hash != self._plan_hash:
            self._plan_hash, self._num_run, self._tried = plan_hash, 0, []
        is_known = self._num_run >= _NUM_CAREFUL and any(_covers(tried, shapes) for tried in self._tried)
        return any(self._ranks.largest((int(not is_known),)))

    def standing(self) -> PartBegin:
        """Returns how a part begins now."""
        parallel = self._present
        return PartBegin(parallel.require_backward_grad_sync, parallel.require_forward_param_sync)

    def run(self, part: Callable[[], _T], shapes: Shapes, standing: PartBegin, tell: Tell) -> _T:
        """Runs a part on all ranks, or finds that one of them cannot.

        Args:
            part: runs forward and backward.
            shapes: of its batch.
            standing: how the part began when it ran first.
            tell: says what a failure means.

        Raises:
            FailedStepError: all of them do the step again.
            RankError: another rank cannot go on.
            Exception: what the part raised here, where that is no lack of memory, or ends the run.
        """
        parallel = self._present
        parallel.require_forward_param_sync = standing.makes_buffers_equal
        try:
            meet_before_forward(parallel)
            with parallel.no_sync():
                result = part()
        except Exception as error:
            told, ends = tell(error)
            self._ranks.largest((1,))
            outcome = self._agreed(told, ends)
            if outcome is error:
                raise
            raise outcome from error
        if any(self._ranks.largest((0,))):
            raise self._agreed(*tell(None))
        if standing.is_reduced:
            reduce_gradients(parallel)
        self._note(shapes)
        return result

    def _note(self, shapes: Shapes) -> None:
        self._num_run += 1
        if shapes and not any(_covers(tried, shapes) for tried in self._tried):
            self._tried = [tried for tried in self._tried if not _covers(shapes, tried)][1 - _NUM_SHAPES :]
            self._tried.append(shapes)

    @property
    def _present(self) -> DistributedDataParallel:
        parallel = self._parallel()
        if parallel is None:
            raise RankError("the DistributedDataParallel around the model is gone, and ranks cannot average gradients")
        return parallel

    def _agreed(self, told: Told, ends: Exception | None) -> Exception:
        said = [msgspec.json.decode(each, type=Told) for each in self._ranks.gathered(msgspec.json.encode(told))]
        return ends or _outcome(said)


def _covers(one: Shapes, other: Shapes) -> bool:
    """Returns whether a batch is at least as large as another one in each dimension of each tensor."""
    if len(one) != len(other) or any(len(ours) != len(theirs) for ours, theirs in zip(one, other, strict=True)):
        return False
    return all(a >= b for ours, theirs in zip(one, other, strict=True) for a, b in zip(ours, theirs, strict=True))


def _outcome(said: Sequence[Told]) -> Exception:
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
    return FailedStepError(found, f" on rank {failed[0]} of {num_ranks}")
