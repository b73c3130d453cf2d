"""Ranks that wait for what another one sends before they train, as stages of a pipeline: refused on all, in seconds.

A rank that is about to receive says so in the store of all, and one that waits for it to train looks there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import distributed

from memwall.errors import RankError
from memwall.patches import Patches
from memwall.session.parallel import PIPELINE, check_no_pipeline
from memwall.torch_internals.process_groups import store_of_all

__all__ = ["receiving", "refuse_receiving", "watch_receives"]

_WAITING = ("recv", "recv_object_list")
"""Functions of torch.distributed that return once the other rank has sent."""
_NAMES = (*_WAITING, "irecv", "batch_isend_irecv")
_REFUSED = "memwall/refused"


def watch_receives(patches: Patches, has_met: Callable[[], bool]) -> None:
    """Has what this rank receives before it trains be known to the others, and refused where it is of a pipeline.

    Args:
        has_met: whether ranks have met: from then on nobody waits for this one.
    """
    for name in _NAMES if distributed.is_available() else ():
        patches.wrap(distributed, name, partial(_received, name, has_met))


def receiving(store: Any, ranks: Sequence[int]) -> list[int]:
    """Returns those of some ranks that are in a function that waits for another one."""
    keys = {rank: _key(rank) for rank in ranks}
    return [rank for rank, key in keys.items() if store.check([key]) and store.get(key) == b"1"]


def refuse_receiving(store: Any, ranks: Sequence[int]) -> RankError:
    """Returns the error of a rank that waits for others to train that wait for it, and leaves it for them."""
    listed = ", ".join(map(str, ranks[:8]))
    text = (
        f"rank{'s' if len(ranks) > 1 else ''} {listed} of {distributed.get_world_size()} wait to receive "
        f"(torch.distributed.recv) before the first training step: {PIPELINE}"
    )
    store.set(_REFUSED, text)
    return RankError(text)


def _received(name: str, has_met: Callable[[], bool], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if has_met() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return original(*args, **kwargs)
    check_no_pipeline()
    if name not in _WAITING:
        return original(*args, **kwargs)
    store, key = store_of_all(), _key(distributed.get_rank())
    store.set(key, "1")
    try:
        found = original(*args, **kwargs)
    except RuntimeError as error:
        refused = _refused(store)
        if refused is not None:
            raise refused from error
        raise
    store.set(key, "0")
    return found


def _refused(store: Any) -> RankError | None:
    try:
        return RankError(store.get(_REFUSED).decode()) if store.check([_REFUSED]) else None
    except RuntimeError:  # the store was with the rank that has ended
        return None


def _key(rank: int) -> str:
    return f"memwall/receives/{rank}"
