"""Ranks agree, or end together: threads that stand for processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from memwall.errors import RankError
from memwall.session.ranks import Ranks
from memwall.session.shared_plan import agreed_excess, tell_of_failure

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")


def on_ranks(num_ranks: int, do: Callable[[Ranks], Any]) -> list[Any]:
    """What each of the ranks returns, or raises."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.5))

    def run(rank: int) -> Any:
        group = distributed.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=0.5))
        try:
            return do(Ranks(store, group, rank=rank, num_ranks=num_ranks))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def test_all_hear_what_each_says_and_what_one_says() -> None:
    """GIVEN messages of different lengths, one of them empty THEN none is cut or filled up."""
    said = on_ranks(3, lambda ranks: (ranks.gathered(b"x" * ranks.rank), ranks.shared(b"from %d" % ranks.rank, 1)))
    assert said == [([b"", b"x", b"xx"], b"from 1")] * 3


def test_a_step_exceeds_its_forecast_on_all_ranks_by_the_most() -> None:
    assert on_ranks(3, lambda ranks: agreed_excess(ranks, 10 * ranks.rank)) == [20] * 3


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    """GIVEN one rank that runs something else THEN the others end within the time-out, and say which one it is."""
    found = on_ranks(3, lambda ranks: None if ranks.rank == 1 else ranks.largest([0]))
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 1 of 3 did not come to the beginning of this step")


def test_what_one_rank_cannot_do_ends_the_run_on_all() -> None:
    def do(ranks: Ranks) -> Any:
        def apply() -> int:
            if ranks.rank == 1:
                raise OSError("no space left")
            return 7

        return ranks.done_by_all("apply the plan", apply)

    first, second = on_ranks(2, do)
    assert isinstance(second, OSError)
    assert str(first) == "rank 1 of 2 could not apply the plan, so no rank goes on: no space left"


def test_a_rank_that_has_failed_tells_the_others_where_they_begin_their_next_step() -> None:
    def do(ranks: Ranks) -> Any:
        return tell_of_failure(ranks) if ranks.rank == 0 else agreed_excess(ranks, 5)

    _, other = on_ranks(2, do)
    assert isinstance(other, RankError)
    assert str(other).startswith("rank 0 of 2 ended its run in the last step")


def test_the_last_words_of_a_run_need_no_group() -> None:
    """GIVEN a group that is closed by then, and a rank that left no word THEN rank 0 hears those of the others."""

    def do(ranks: Ranks) -> Any:
        ranks.leave()
        return {} if ranks.rank == 2 else ranks.told_at_end(f"{ranks.rank}".encode(), timedelta(seconds=0.3))

    assert on_ranks(3, do) == [{0: b"0", 1: b"1"}, {}, {}]
