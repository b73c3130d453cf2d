"""Threads that stand for the processes of ranks, with a gloo group of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch import distributed

from memwall.session.ranks.agreement import Ranks

__all__ = ["on_ranks"]


def on_ranks(num_ranks: int, do: Callable[[Ranks], Any]) -> list[Any]:
    """Returns what each of the ranks returns, or raises."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=2))
    connected = threading.Barrier(num_ranks, timeout=10)  # a rank that ends before fails the others' connecting

    def run(rank: int) -> Any:
        group = distributed.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=2))
        connected.wait()
        try:
            return do(Ranks(store, group, rank=rank, num_ranks=num_ranks))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
