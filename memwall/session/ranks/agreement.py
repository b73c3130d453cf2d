"""Lets the processes that train together agree, on a host group of memwall's own beside the groups of the script.

Everything here is called by all ranks at the same point of their loops, where none of them is between two collectives
of a step. A rank that does not come, or has ended, is named in an error on all others: none of them waits for ever.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, distributed

from memwall.errors import ApplyError, RankError
from memwall.machine.process_group import num_processes
from memwall.torch_internals.dispatch import without_dispatch_modes
from memwall.torch_internals.process_groups import store_of_all

_T = TypeVar("_T")
_POLL_SECONDS = 0.01
_LEFT = "left-within-step"
_log = logging.getLogger(__name__)
_PATIENCE = timedelta(seconds=15)
"""Time after which a rank that waits for others to begin to train says what may be the matter."""
_GRACE = timedelta(seconds=5)
"""Time that a rank that knows that another one is missing waits for those that are only late, to tell them apart."""

_MEETING = (
    "ranks share one plan, and meet before each one's first forward: open the session, or run the command, on every "
    "rank; none may wait for another one to train first, in a barrier or as a later stage of a pipeline by hand (build "
    "that by torch.distributed.pipelining)"
)


class Ranks:
    """Holds the group of one session; `meet` makes it.

    Attributes:
        rank: this process's number among all.
        num_ranks: how many there are.
        have_inputs: whether all of them take a further step, as far as is known; see `uneven_inputs`.
        have_newcomer: whether an optimizer had begun to step on one of them when they agreed last.
        have_longer: whether one of them had a batch then that has no room under the plan.
    """

    def __init__(self, store: Any, group: Any, *, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store, self._group = store, group
        self._num_agreements = 0
        self._has_left = False
        self.have_inputs, self.have_newcomer, self.have_longer = True, False, False

    @classmethod
    def meet(cls) -> "Ranks | None":
        """Returns what this process agrees with the others by; None where it trains alone.

        Raises:
            RankError: not all of them opened a session within the time-out of the script's process group.
        """
        if num_processes() == 1:
            return None
        if distributed.get_backend() == "fake":  # stands for ranks that are not there
            return None
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        whole = store_of_all()
        timeout: timedelta = whole.timeout
        store, missing = _met(whole, rank, num_ranks, timeout)
        if missing:
            raise RankError(
                f"{_named(missing)} of {num_ranks} did not begin to train under memwall within "
                f"{timeout.total_seconds():.0f} s, the time-out of the process group; {_MEETING}"
            )
        # Of the host: it neither touches the devices nor waits for their streams. `new_group` may find addresses of
        # ranks that torchrun has restarted since, and waits for processes that are no more.
        group = distributed.ProcessGroupGloo(store, rank, num_ranks, timeout)
        return cls(store, group, rank=rank, num_ranks=num_ranks)

    def largest(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns the largest of all ranks, number by number."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def summed(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns the sums over all ranks, number by number."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def gathered(self, message: bytes) -> list[bytes]:
        """Returns what each rank says, in the order of their numbers."""
        sizes = self._all_of(torch.tensor([len(message)], dtype=torch.int64, device="cpu"))
        padded = _bytes(message + bytes(int(max(sizes)) - len(message)))
        return [bytes(found[: int(size)].tolist()) for found, size in zip(self._all_of(padded), sizes, strict=True)]

    def shared(self, message: bytes, source: int) -> bytes:
        """Returns what one rank says; of what the others give as a message, nothing is read."""
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        self._meet_at(lambda group: group.broadcast(size, source))
        whole = _bytes(message) if self.rank == source else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._meet_at(lambda group: group.broadcast(whole, source))
        return bytes(whole.tolist())

    def terms_per_rank(self, num_terms: int) -> float:
        """Returns the mean number of loss terms in the ranks' batches, by which each divides where they take the mean.

        Raises:
            ApplyError: a rank has none, on all ranks: its mean loss is not a number.
        """
        total, num_empty = self.summed((num_terms, num_terms == 0))
        if num_empty:
            raise ApplyError(
                f"{num_empty} of {self.num_ranks} ranks have a batch without a loss term (all labels ignored); skip "
                "this batch on all of them"
            )
        return total / self.num_ranks

    def done_by_all(self, what: str, do: Callable[[], _T]) -> _T:
        """Does something on every rank, or ends the run on all of them.

        Args:
            what: the verb and its object, for the message: "apply the plan".

        Raises:
            RankError: it failed on another rank.
            Exception: what it raised on this one.
        """
        failure: Exception | None = None
        try:
            result = do()
        except Exception as error:
            failure = error
        said = self.gathered(b"" if failure is None else (str(failure) or type(failure).__name__).encode())
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text:
                raise RankError(
                    f"rank {rank} of {self.num_ranks} could not {what}, so no rank goes on: {text.decode()}"
                )
        return result

    def told_at_end(self, message: bytes, timeout: timedelta) -> dict[int, bytes]:
        """Leaves a last word for rank 0, and returns to it those of all ranks that left one in time; {} to others.

        The script may have closed its process groups by then: only the store is used, which lives as long as rank 0, or
        the launcher.
        """

        def tell() -> dict[int, bytes]:
            self._store.set(f"end/{self.rank}", message)
            if self.rank:
                return {}
            missing = _missing(self._store, "end", self.num_ranks, timeout)
            return {rank: self._store.get(f"end/{rank}") for rank in range(self.num_ranks) if rank not in missing}

        with suppress(RuntimeError):
            told = _answered(tell, timeout + _GRACE)
            if told is not None:
                return told
        return {0: message} if self.rank == 0 else {}

    def begin_planning(self) -> None:
        """Says that this rank waits for the others to plan from a step that all have recorded.

        Raises:
            RankError: one has left within that step, and does not come.
        """
        self._store.set(f"plans/{self._num_agreements}", "")
        if self._store.add(_LEFT, 0):
            raise RankError(_left_within_step("another one", self.num_ranks))

    def leave_within_step(self) -> None:
        """Says that this rank has no more batches, though the step that all record has not ended.

        It does not wait to be heard: others may need its part of what they exchange before they come to where ranks
        plan. Whoever of the two comes second there ends, and with it the other one.

        Raises:
            RankError: another one has ended that step, and waits for this one.
        """
        self._store.add(_LEFT, 1)
        self._has_left = True
        if self._store.check([f"plans/{self._num_agreements}"]):
            raise RankError(_left_within_step("this one", self.num_ranks))

    def left_in_vain(self) -> RankError | None:
        """Returns the error of this rank where it has left within a step that others have ended; else None."""
        if not self._has_left:
            return None
        with suppress(RuntimeError):  # the store was with one that has ended
            if not self._store.check([f"plans/{self._num_agreements}"]):
                return None
        return RankError(_left_within_step("this one", self.num_ranks))

    def come_back(self) -> None:
        """Says that this rank goes on with the others, whether or not it had left within a step, as all of them had."""
        self.have_inputs = True
        if self._has_left:
            self._has_left = False
            with suppress(RuntimeError):  # where one has ended, the store may have
                self._store.add(_LEFT, -1)

    def leave(self) -> None:
        """Closes the group: ranks that still wait for this one hear of it at once. Safe to call twice."""
        self._group = None

    def _reduced(self, values: Sequence[int], operation: Any) -> tuple[int, ...]:
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp(operation)
        self._meet_at(lambda group: group.allreduce([numbers], options))
        return tuple(numbers.tolist())

    def _all_of(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.num_ranks)]
        self._meet_at(lambda group: group.allgather(found, own))
        return found

    def _meet_at(self, begin: Callable[[Any], Any]) -> None:
        self._num_agreements += 1
        try:
            with torch.no_grad(), without_dispatch_modes():
                begin(self._group).wait()
        except (RuntimeError, ValueError) as error:
            raise self._lost() from error

    def _lost(self) -> RankError:
        """Returns an error that names the ranks that did not come to the last agreement."""
        place, timeout = f"at/{self._num_agreements}", min(_GRACE, self._store.timeout)

        def look() -> list[int]:
            self._store.set(f"{place}/{self.rank}", "")
            return _missing(self._store, place, self.num_ranks, timeout)

        try:
            missing = _answered(look, timeout + _GRACE)
        except RuntimeError:
            missing = [0]  # the store was with it
        if missing is None:
            return RankError(
                f"rank 0 of {self.num_ranks}, or the launcher of its host, does not answer: it is stopped, or its host "
                "is lost, and with it the store by which ranks find each other. This rank ends too, since no rank can "
                "train on alone"
            )
        who = _named(missing) if missing else "a rank"
        return RankError(
            f"{who} of {self.num_ranks} did not come to the beginning of this step, where ranks agree: it "
            "has ended, or runs something else; a message of its own says why, if it could write one. This rank ends "
            "too, since no rank can train on alone"
        )


def _met(whole: Any, rank: int, num_ranks: int, timeout: timedelta) -> tuple[Any, list[int]]:
    """Meets the other ranks under a name that is new, which rank 0 tells each rank that is there.

    torchrun keeps the store of ranks that it restarts: what is found there may be of an earlier process, which has
    ended anywhere. So each rank is told the name under a word of its own, that no process has used before.

    Returns:
        A store for the ranks that have met, and those that did not come within a time.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    hall, word = PrefixStore("memwall/meeting", whole), uuid4().hex
    name = "" if rank else word

    def come(timeout: timedelta) -> list[int]:
        nonlocal name
        until = time.monotonic() + timeout.total_seconds()
        name = name or _told_name(hall, word, timeout)
        if not name:
            return [0, *(other for other in range(1, num_ranks) if not _word_of(hall, other))]
        store = PrefixStore(f"memwall/{name}", whole)
        store.set(f"met/{rank}", "")
        if rank == 0:
            return _uncalled(hall, store, name, num_ranks, until)
        return _missing(store, "met", num_ranks, timedelta(seconds=max(0.1, until - time.monotonic())))

    hall.set(f"here/{rank}", word)
    missing = come(min(_PATIENCE, timeout))
    if missing and timeout > _PATIENCE:
        _log.warning(
            "%s of %d did not begin to train within %d s, and waiting goes on for up to %d s; %s",
            _named(missing),
            num_ranks,
            _PATIENCE.seconds,
            timeout.total_seconds(),
            _MEETING,
        )
        missing = come(timeout - _PATIENCE)
    hall.set(f"here/{rank}", "")
    return PrefixStore(f"memwall/{name}", whole), missing


def _word_of(hall: Any, rank: int) -> str:
    """Returns the word of a rank that waits for the others; "" without one."""
    own = f"here/{rank}"
    return str(hall.get(own).decode()) if hall.check([own]) else ""


def _told_name(hall: Any, word: str, timeout: timedelta) -> str:
    """Returns the name that rank 0 tells the process that has left a word; "" where it does not in time."""
    try:
        hall.wait([f"name/{word}"], timeout)
    except RuntimeError:
        return ""
    return str(hall.get(f"name/{word}").decode())


def _uncalled(hall: Any, store: Any, name: str, num_ranks: int, until: float) -> list[int]:
    """Tells every word that is there the name, and returns the ranks that have not come by it in time."""
    told, missing = set[str](), list(range(num_ranks))
    while True:
        missing = [rank for rank in missing if not store.check([f"met/{rank}"])]
        if not missing or time.monotonic() >= until:
            return missing
        for rank in missing:
            if (word := _word_of(hall, rank)) and word not in told:
                told.add(word)
                hall.set(f"name/{word}", name)
        time.sleep(_POLL_SECONDS)


def _answered(ask: Callable[[], _T], timeout: timedelta) -> _T | None:
    """Returns what the store answers; None where it does not in time.

    A server that is stopped accepts a question and never answers: no time-out of the store's own ends that wait.
    """
    found: list[_T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=run, name="memwall asks the store", daemon=True)
    asking.start()
    asking.join(timeout.total_seconds())
    if failures:
        raise failures[0]
    return found[0] if found else None


def _missing(store: Any, place: str, num_ranks: int, timeout: timedelta) -> list[int]:
    """Returns the ranks that have left no sign at a place of the store after a time."""
    keys = [f"{place}/{rank}" for rank in range(num_ranks)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _left_within_step(who: str, num_ranks: int) -> str:
    return (
        f"{who} of {num_ranks} ranks has no more batches in the midst of a step that others have ended, from which all "
        "would plan together; have each rank take whole steps, over all of their micro-batches"
    )


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _bytes(message: bytes) -> Tensor:
    if not message:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
