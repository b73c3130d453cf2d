"""Ranks that wait for another one before they train, which waits for them to train: refused on all, in seconds.

As in a pipeline by hand, or where one rank trains something alone first. A rank that is about to wait says so in the
store of all, and one that waits for it to train looks there.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from torch import distributed

from memwall.errors import RankError
from memwall.machine.process_group import num_processes
from memwall.patches import Patches
from memwall.torch_internals.process_groups import store_of_all

_ALONE = (
    "ranks meet before each one's first training step, so that none of them trains alone while others wait for it; "
    "train what one rank trains first in a run of its own, or train without memwall"
)
PIPELINE = (
    "ranks meet before each one's first forward, and a later stage of a pipeline by hand has none before the earlier "
    "ones have had theirs; build it by torch.distributed.pipelining, whose schedules memwall follows, train without "
    "memwall, or divide the model by DistributedDataParallel or fully_shard (FSDP2)"
)
_RECEIVING = ("recv", "recv_object_list")
"""Functions of torch.distributed that return once the other rank has sent."""
_MEETING = ("barrier", "all_reduce")
"""Functions of torch.distributed that return when all ranks of a group have come.

Those do not return at once: a rank may be stopped, or its network slow, when the others train already.
"""
_REFUSED = "memwall/refused"
_NOTHING = b"-"


class Wait(NamedTuple):
    """Names one call by which a rank waits for others."""

    number: int
    """Counts this rank's calls: another one is no longer the same wait."""
    call: str
    """The function's name."""
    needed: tuple[int, ...]
    """The ranks without which it does not return, but the rank itself; none where any rank may send.

    Of a call that all ranks of a group make, those that have not made it.
    """

    def may_end(self, missing: Sequence[int], own: int) -> bool:
        """Returns whether it can return while all ranks but those that are missing wait for this one to train."""
        if self.needed:
            return set(self.needed) <= set(missing)
        return any(rank != own for rank in missing)


def watch_receives(patches: Patches, has_met: Callable[[], bool]) -> None:
    """Has what this rank waits for before it trains be known to the others.

    Args:
        has_met: whether ranks have met: from then on nobody waits for this one.
    """
    if not distributed.is_available():
        return
    word = uuid4().hex
    if distributed.is_initialized():
        _come(word)
    else:
        patches.wrap(distributed, "init_process_group", partial(_begins, word))
    # Calls that all ranks of a group make are known apart by their count, which begins with the group.
    for name in (*_RECEIVING, *(() if distributed.is_initialized() else _MEETING)):
        patches.wrap(distributed, name, partial(_waits, name, has_met, word))


def waits_of(store: Any, ranks: Sequence[int]) -> dict[int, Wait]:
    """Returns those of some ranks that are in a function that waits for other ranks, and by which call.

    One that all others have made is left out: it returns, however late.
    """
    keys = {rank: _key(rank, _word_of(store, rank)) for rank in ranks}
    written = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    waits = {rank: _read(store, text) for rank, text in written.items() if text != _NOTHING}
    return {rank: wait for rank, wait in waits.items() if wait.needed or wait.call in _RECEIVING}


def refuse_waiting(store: Any, waits: dict[int, Wait]) -> RankError:
    """Returns the error of a rank that waits for others to train that wait for it, and leaves it for them.

    Args:
        waits: which ranks will never train, and by which call each of them waits.
    """
    listed, call = ", ".join(map(str, list(waits)[:8])), next(iter(waits.values())).call
    receives = call in _RECEIVING
    text = (
        f"{'ranks' if len(waits) > 1 else 'rank'} {listed} of {distributed.get_world_size()} "
        f"{'wait' if len(waits) > 1 else 'waits'} "
        f"{'to receive ' if receives else 'for others '}(torch.distributed.{call}) before the first training step"
        f"{'' if receives else ', which others have begun'}: {PIPELINE if receives else _ALONE}"
    )
    store.set(_REFUSED, text)
    return RankError(text)


def _begins(word: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if num_processes() > 1 and distributed.get_backend() != "fake":
        _come(word)
    return result


def _come(word: str) -> None:
    """Says by which word what this process waits for is found: torchrun keeps the store of ranks that it restarts."""
    with suppress(RuntimeError):
        store_of_all().set(_place_of_word(distributed.get_rank()), word)


def _waits(
    name: str, has_met: Callable[[], bool], word: str, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if has_met() or num_processes() == 1:
        return original(*args, **kwargs)
    store, own = store_of_all(), distributed.get_rank()
    store.set(_place_of_word(own), word)
    key, made, turn = _key(own, word), "", 0
    if name in _RECEIVING:
        needed = _source(*args, **kwargs)
    else:
        given = dict(zip(("group",) if name == "barrier" else ("tensor", "op", "group"), args, strict=False)) | kwargs
        group = given.get("group") or distributed.group.WORLD
        if not isinstance(group, distributed.ProcessGroup):  # this rank is not in it
            return original(*args, **kwargs)
        needed, made = distributed.get_process_group_ranks(group), group.group_name
        turn = store.add(_made(own, word, made), 0) + 1
    others = ",".join(str(rank) for rank in needed if rank != own)
    store.set(key, f"{store.add(f'{key}/calls', 1)} {name} {others} {turn} {made}")
    try:
        result = original(*args, **kwargs)
    except RuntimeError as error:
        refused = _refused(store)
        if refused is not None:
            raise refused from error
        raise
    else:
        if turn:
            with suppress(RuntimeError):
                store.add(_made(own, word, made), 1)
        return result
    finally:
        with suppress(RuntimeError):  # the store was with the rank that has ended
            store.set(key, _NOTHING)


def _source(*args: Any, **options: Any) -> Sequence[int]:
    """Returns the rank that is to send, by the arguments of a receiving function; none where any may."""
    given = dict(zip(("to", "src", "group"), args, strict=False)) | options
    if given.get("group_src") is not None:
        group: Any = given.get("group") or distributed.group.WORLD
        return [distributed.get_global_rank(group, given["group_src"])]
    return [] if given.get("src") is None else [int(given["src"])]


def _read(store: Any, text: bytes) -> Wait:
    number, call, needed, turn, made = text.decode().split(" ", 4)
    ranks = map(int, filter(None, needed.split(",")))
    return Wait(int(number), call, tuple(rank for rank in ranks if not _has_made(store, rank, made, int(turn))))


def _has_made(store: Any, rank: int, group: str, turn: int) -> bool:
    return turn > 0 and store.add(_made(rank, _word_of(store, rank), group), 0) >= turn


def _refused(store: Any) -> RankError | None:
    try:
        return RankError(store.get(_REFUSED).decode()) if store.check([_REFUSED]) else None
    except RuntimeError:  # the store was with the rank that has ended
        return None


def _place_of_word(rank: int) -> str:
    return f"memwall/receives/{rank}"


def _word_of(store: Any, rank: int) -> str:
    place = _place_of_word(rank)
    return str(store.get(place).decode()) if store.check([place]) else ""


def _key(rank: int, word: str) -> str:
    return f"{_place_of_word(rank)}/{word}"


def _made(rank: int, word: str, group: str) -> str:
    """Returns where it is counted how many calls a rank has made that all ranks of a group make."""
    return f"memwall/made/{rank}/{word}/{group}"
