"""Runs parts of a step so that no rank waits for one that fails in them: all do the step again, or none does.

Under DistributedDataParallel a part runs forward and backward without the others, so that it may fail on one rank.
Then all say whether it has, by one number, and only where none has, gradients are averaged, once.
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

    def standing(self) -> PartBegin:
        """Returns how a part begins now."""
        parallel = self._present
        return PartBegin(parallel.require_backward_grad_sync, parallel.require_forward_param_sync)

    def run(self, part: Callable[[], _T], standing: PartBegin, tell: Tell) -> _T:
        """Runs a part on all ranks, or finds that one of them cannot.

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
        return result

    @property
    def _present(self) -> DistributedDataParallel:
        parallel = self._parallel()
        if parallel is None:
            raise RankError("the DistributedDataParallel around the model is gone, and ranks cannot average gradients")
        return parallel

    def _agreed(self, told: Told, ends: Exception | None) -> Exception:
        said = [msgspec.json.decode(each, type=Told) for each in self._ranks.gathered(msgspec.json.encode(told))]
        return ends or _outcome(said)


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
