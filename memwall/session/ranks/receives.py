"""Ranks that wait for what another one sends before they train, as a pipeline by hand: refused on all, in seconds.

A rank that is about to receive says so in the store of all, and one that waits for it to train looks there.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import distributed

from memwall.errors import RankError
from memwall.machine.process_group import num_processes
from memwall.patches import Patches
from memwall.torch_internals.process_groups import store_of_all

PIPELINE = (
    "ranks meet before each one's first forward, and a later stage of a pipeline by hand has none before the earlier "
    "ones have had theirs; build it by torch.distributed.pipelining, whose schedules memwall follows, train without "
    "memwall, or divide the model by DistributedDataParallel or fully_shard (FSDP2)"
)
_WAITING = ("recv", "recv_object_list")
"""Functions of torch.distributed that return once the other rank has sent."""
_REFUSED = "memwall/refused"
_NOTHING = b"-"
_ANYBODY = -1


class Receive(NamedTuple):
    """Names one call by which a rank waits for another one."""

    number: int
    """Counts this rank's calls: another one is no longer the same wait."""
    source: int
    """The rank that is to send; -1 for any."""

    def awaits(self, ranks: Sequence[int], own: int) -> bool:
        """Returns whether one of some ranks, but the rank itself, may be about to send."""
        return any(rank != own and self.source in (rank, _ANYBODY) for rank in ranks)


def watch_receives(patches: Patches, has_met: Callable[[], bool]) -> None:
    """Has what this rank receives before it trains be known to the others.

    Args:
        has_met: whether ranks have met: from then on nobody waits for this one.
    """
    for name in _WAITING if distributed.is_available() else ():
        patches.wrap(distributed, name, partial(_received, has_met))


def receiving(store: Any, ranks: Sequence[int]) -> dict[int, Receive]:
    """Returns those of some ranks that are in a function that waits for another one, and by which call."""
    written = {rank: store.get(_key(rank)) for rank in ranks if store.check([_key(rank)])}
    return {rank: Receive(*map(int, text.split())) for rank, text in written.items() if text != _NOTHING}


def refuse_receiving(store: Any, ranks: Sequence[int]) -> RankError:
    """Returns the error of a rank that waits for others to train that wait for it, and leaves it for them."""
    listed = ", ".join(map(str, ranks[:8]))
    text = (
        f"rank{'s' if len(ranks) > 1 else ''} {listed} of {distributed.get_world_size()} wait to receive "
        f"(torch.distributed.recv) before the first training step: {PIPELINE}"
    )
    store.set(_REFUSED, text)
    return RankError(text)


def _received(has_met: Callable[[], bool], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if has_met() or num_processes() == 1:
        return original(*args, **kwargs)
    store, key = store_of_all(), _key(distributed.get_rank())
    store.set(key, f"{store.add(f'{key}/calls', 1)} {_source(*args, **kwargs)}")
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        refused = _refused(store)
        if refused is not None:
            raise refused from error
        raise
    finally:
        with suppress(RuntimeError):  # the store was with the rank that has ended
            store.set(key, _NOTHING)


def _source(*args: Any, **options: Any) -> int:
    """Returns the rank that is to send, by the arguments of a receiving function; -1 where any may."""
    given = dict(zip(("to", "src", "group"), args, strict=False)) | options
    if given.get("group_src") is not None:
        group: Any = given.get("group") or distributed.group.WORLD
        return distributed.get_global_rank(group, given["group_src"])
    return _ANYBODY if given.get("src") is None else int(given["src"])


def _refused(store: Any) -> RankError | None:
    try:
        return RankError(store.get(_REFUSED).decode()) if store.check([_REFUSED]) else None
    except RuntimeError:  # the store was with the rank that has ended
        return None


def _key(rank: int) -> str:
    return f"memwall/receives/{rank}"
