"""Ranks with fewer batches than others, in contexts of torch's `Join` (`DistributedDataParallel.join`).

A rank that leaves such a context has no more batches, and takes part in what the others' models still exchange. Ranks
agree then for the last time, until all of them have left it: meanwhile the plan stays as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import distributed

from memwall.patches import Patches
from memwall.session.ranks.agreement import Ranks


def watch_joins(patches: Patches, ends: Callable[[bool], None], ranks: Callable[[], Ranks | None]) -> None:
    """Has the others hear that this rank has no more batches, before it waits for them.

    Args:
        ends: says so to all ranks; with False, it forgets the step in which this rank has failed.
        ranks: returns what ranks agree by, once they have met.
    """
    if distributed.is_available():
        from torch.distributed.algorithms.join import Join

        patches.wrap(Join, "__exit__", partial(_exit, ends, ranks))


def _exit(
    ends: Callable[[bool], None],
    ranks: Callable[[], Ranks | None],
    original: Callable[..., Any],
    join: Any,
    kind: type[BaseException] | None,
    *about: Any,
) -> Any:
    try:
        ends(kind is None)
        return original(join, kind, *about)
    except RuntimeError as error:
        met = ranks()
        failure = None if met is None else met.left_in_vain()
        if failure is None:
            raise
        raise failure from error
    finally:  # where ranks end early, each of them hears of it by an error
        met = ranks()
        if met is not None:
            met.come_back()
